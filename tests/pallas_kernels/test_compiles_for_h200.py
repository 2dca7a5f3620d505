"""The kernels compile for an H200 without one, and ptxas finds nothing that would make them slow."""

import json

import pytest

from tests.pallas_kernels.aot import compiled, run_script, show

OPS = ("paged_attention", "decode_attention", "few_rows", "sparse_mla", "indexer_logits", "topk_indices")


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_no_spills_and_no_serialized_wgmma(op: str) -> None:
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax[cuda13], no GPU")
    kernels = compiled("compile_for_h200.py", op)
    show(f"{op}, H200", kernels, ("registers", "spilled", "shared", "slow", "temp"))
    taken = [kernel for kernel in kernels if "refused" not in kernel]
    assert len(taken) >= 6
    for kernel in taken:
        assert kernel["registers"] and not kernel["spilled"] and not kernel["slow"], kernel


# Two layers and the MTP module; on two stages a device has one of the layers, and half the module's heads and
# products, which must then be summed.
@pytest.mark.parametrize(("stages", "kernels", "caches"), [(1, 5 + 5 + 5, 6), (2, 5 + 3, 3)])
def test_the_engine_step_takes_the_kernels_and_copies_no_cache(
    stages: int, kernels: int, caches: int
) -> None:
    pytest.importorskip("jax_cuda13_plugin", reason="needs jax[cuda13], no GPU")
    found = json.loads(run_script("compile_engine_for_h200.py", stages, 2, 1, timeout=300))
    assert found["kernels"] == kernels
    assert found["temporaries"] < found["one_cache"]
    assert found["aliased"] > caches * found["one_cache"]
