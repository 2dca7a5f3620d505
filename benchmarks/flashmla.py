"""FlashMLA's sparse kernels on this machine's GPU, timed for `benchmarks/sparse_mla.py`, which runs this.

The library is the one file that the vLLM 0.26.0 wheel ships (for torch 2.11.0+cu130):

    pip download --no-deps vllm==0.26.0 && unzip -j vllm-0.26.0-*.whl vllm/_flashmla_C.abi3.so
    python benchmarks/flashmla.py _flashmla_C.abi3.so 64x128 256x64

Prints a line a shape: tokens, heads, us with a bfloat16 cache, us with the fp8 cache (656 bytes a row).
Median device time of calls in a CUDA graph, top-k 2048, indices as benchmarks/sparse_mla.py draws them.
"""

import sys

import numpy as np
import torch
from triton.testing import do_bench_cudagraph

ROWS, CHOSEN, PAGE = 1 << 20, 2048, 64


def indices(tokens: int) -> torch.Tensor:
    random = np.random.default_rng(0)
    base = [random.permutation(65536)[:CHOSEN] + (i % 16) * 65536 for i in range(min(tokens, 64))]
    return torch.tensor(np.stack([base[i % 64] for i in range(tokens)]), dtype=torch.int32, device="cuda")


def fp8_cache() -> torch.Tensor:
    cache = torch.empty(ROWS // PAGE, PAGE, 1, 656, device="cuda", dtype=torch.uint8)
    latent = torch.randn(ROWS // PAGE, PAGE, 1, 512, device="cuda", dtype=torch.float16)
    cache[..., :512] = latent.to(torch.float8_e4m3fn).view(torch.uint8)
    cache[..., 512:528] = torch.ones(ROWS // PAGE, PAGE, 1, 4, device="cuda").view(torch.uint8)
    rope = torch.randn(ROWS // PAGE, PAGE, 1, 64, device="cuda", dtype=torch.bfloat16)
    cache[..., 528:] = rope.view(torch.uint8)
    return cache.view(torch.float8_e4m3fn)


def main() -> None:
    torch.ops.load_library(sys.argv[1])
    library = torch.ops._flashmla_C
    cache = torch.randn(ROWS, 1, 576, device="cuda", dtype=torch.bfloat16)
    cache8, scale = fp8_cache(), 192**-0.5
    for shape in sys.argv[2:]:
        tokens, heads = map(int, shape.split("x"))
        chosen = indices(tokens)
        q = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16)
        plan: list = [None, None]

        def prefill(q=q, chosen=chosen):
            library.sparse_prefill_fwd(q, cache, chosen[:, None], scale, 512, None, None, None)

        def decode(q=q, chosen=chosen, plan=plan):
            out = library.sparse_decode_fwd(
                q[:, None], cache8, chosen[:, None], None, None, *plan, None, None, None, 512, scale, None
            )
            plan[:] = out[2:4]

        decode()
        us = [do_bench_cudagraph(run, rep=30, return_mode="median") * 1e3 for run in (prefill, decode)]
        print(tokens, heads, *(f"{x:.2f}" for x in us), flush=True)


if __name__ == "__main__":
    main()
