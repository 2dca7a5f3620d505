"""Compiles kernels at their named shapes for an H200 that is not there: a JSON line a kernel, on stdout.

    python tests/pallas_kernels/compile_for_h200.py OP    (one of OPS; needs jax[cuda13])

h200.txtpb is the target as an H200 machine describes it:
`jax._src.lib.xla_client.get_topology_for_devices(jax.devices()).target_config`.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from pallas_kernels.decode_attention import decode_attention  # noqa: E402
from pallas_kernels.device import NotHereError  # noqa: E402
from pallas_kernels.few_rows import norm_qkv_rope, norm_swiglu, project_add, shapes  # noqa: E402
from pallas_kernels.indexer_logits import indexer_logits  # noqa: E402
from pallas_kernels.indexer_logits import shapes as indexer_shapes  # noqa: E402
from pallas_kernels.paged_attention import paged_attention  # noqa: E402
from pallas_kernels.paged_attention.shapes import (  # noqa: E402
    BATCHES,
    MODELS,
    PAGE_SIZE,
    QUERIES,
    Load,
    loads,
)
from pallas_kernels.sparse_mla import shapes as latent_shapes  # noqa: E402
from pallas_kernels.sparse_mla import sparse_mla  # noqa: E402
from pallas_kernels.topk_indices import shapes as topk_shapes  # noqa: E402
from pallas_kernels.topk_indices import topk_indices  # noqa: E402

MORE_LOADS = (("qwen2_7b", Load(batch=1, queries=9, live=1024, table=1024)),)
MORE_LAYERS = (("smollm2_135m", 64, 4), ("mimo_7b", 2, 1))  # (model, rows, tokens a sequence)
# Other pages: (heads, batch, tokens a sequence, positions, page, keys)
MORE_INDEXERS = (
    (64, 8, 4, 8192, 16, jnp.bfloat16),
    (32, 64, 2, 8192, 32, jnp.float8_e4m3fn),
)

# setmaxnreg ignored, wgmma serialized (three reasons)
SLOW = ("C7504", "C7509", "C7510", "C7512")

Spec = Callable[..., jax.ShapeDtypeStruct]


def compile_one(name: str, run: Callable[..., object], *specs: object, donate: tuple[int, ...] = ()) -> None:
    reason = ""
    with captured() as lines:
        try:
            memory = jax.jit(run, donate_argnums=donate).lower(*specs).compile().memory_analysis()
        except NotHereError as refused:
            memory, reason = None, str(refused)
    text = "".join(lines)
    if memory is None:
        print(json.dumps({"kernel": name, "refused": reason}), flush=True)
        return
    found = {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", text)), default=0),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", text))),
        "shared": max(map(int, re.findall(r"smem_scratch_bytes=(\d+)", text)), default=0),
        "slow": sorted({code for code in SLOW if code in text}),
        "temp": memory.temp_size_in_bytes,
    }
    print(json.dumps({"kernel": name} | found), flush=True)


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """What compilers write to the process' own stdout and stderr meanwhile, filled in at the end."""
    lines: list[str] = []
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile("w+") as file:
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            yield lines
        finally:
            for stream, old in zip((1, 2), kept, strict=True):
                os.dup2(old, stream)
                os.close(old)
            file.seek(0)
            lines.extend(file)


def attention(spec: Spec, name: str, load: Load) -> None:
    heads = MODELS[name]
    cache = (load.batch * load.table // PAGE_SIZE, PAGE_SIZE, heads.kv_heads, heads.width)
    compile_one(
        f"paged_attention {name} {load.batch} x {load.queries} of {load.table}",
        functools.partial(paged_attention, implementation="mosaic_gpu"),
        spec(load.batch, load.queries, heads.kv_heads, heads.per_kv, heads.width),
        spec(*cache),
        spec(*cache),
        spec(load.batch, load.table // PAGE_SIZE, dtype=jnp.int32),
        spec(load.batch, load.queries, dtype=jnp.int32),
    )


def layer(spec: Spec, name: str, rows: int) -> None:
    sizes = shapes.MODELS[name]
    weights = {name: spec(*shape) for name, shape in sizes.weights().items()}
    x, tables = spec(rows, sizes.hidden), (spec(rows, sizes.width // 2, dtype=jnp.float32),) * 2
    compile_one(
        f"norm_qkv_rope {name} {rows}",
        functools.partial(norm_qkv_rope, eps=1e-5, implementation="mosaic_gpu"),
        *(x, weights["input_norm"], weights["qkv"], weights.get("qkv_bias"), tables),
    )
    compile_one(
        f"norm_swiglu {name} {rows}",
        functools.partial(norm_swiglu, eps=1e-5, implementation="mosaic_gpu"),
        *(x, weights["post_norm"], weights["gate_up"]),
    )
    for weight in ("o", "down"):
        compile_one(
            f"project_add {name} {weight} {rows}",
            functools.partial(project_add, implementation="mosaic_gpu"),
            *(spec(rows, weights[weight].shape[1]), weights[weight], x),
        )


def decode(spec: Spec, name: str, rows: int, tokens: int) -> None:
    sizes = shapes.MODELS[name]
    g, h, batch, pages = sizes.kv_heads, sizes.width, rows // tokens, 64
    cache = spec(batch * pages + 4, PAGE_SIZE, g, h)
    compile_one(
        f"decode_attention {name} {batch} x {tokens}",
        functools.partial(decode_attention, implementation="mosaic_gpu"),
        *(spec(rows, g, sizes.per_kv + 2, h), cache, cache, spec(batch, pages, dtype=jnp.int32)),
        *(spec(batch, tokens, dtype=jnp.int32), spec(batch, dtype=jnp.int32)),
        donate=(1, 2),
    )


def latent(spec: Spec, name: str) -> None:
    load = latent_shapes.LOADS[name]
    compile_one(
        f"sparse_mla {name}",
        functools.partial(sparse_mla, scale=latent_shapes.SCALE, implementation="mosaic_gpu"),
        spec(load.tokens, load.heads, latent_shapes.ROW),
        spec(1024, 64, latent_shapes.ROW),
        spec(load.tokens, load.chosen, dtype=jnp.int32),
    )


def indexer(
    spec: Spec, heads: int, batch: int, tokens: int, live: int, page: int, dtype: jax.typing.DTypeLike
) -> None:
    rows, pages, fp32 = batch * tokens, live // page, jnp.float32
    scales = {} if dtype == jnp.bfloat16 else {"scales": spec(batch * pages, page, dtype=fp32)}

    def run(*operands: jax.Array) -> jax.Array:
        return indexer_logits(
            *operands[:5], scales=operands[5] if scales else None, implementation="mosaic_gpu"
        )

    compile_one(
        f"indexer_logits {heads} x {batch} x {tokens} {live}/{page} {jnp.dtype(dtype)}",
        run,
        *(spec(rows, heads, 128, dtype=dtype), spec(rows, heads, dtype=fp32)),
        *(spec(batch * pages, page, 128, dtype=dtype), spec(batch, pages, dtype=jnp.int32)),
        *(spec(batch, tokens, dtype=jnp.int32), *scales.values()),
    )


def topk(spec: Spec, rows: int, length: int, k: int) -> None:
    compile_one(
        f"topk_indices {k} of {rows} x {length}",
        functools.partial(topk_indices, k=k, implementation="mosaic_gpu"),
        *(spec(rows, length, dtype=jnp.float32), spec(rows, dtype=jnp.int32)),
    )


def run_paged_attention(spec: Spec) -> None:
    distinct = {(load.batch, load.queries, load.table): load for load in loads()}  # live is no shape
    for case in (*itertools.product(MODELS, distinct.values()), *MORE_LOADS):
        attention(spec, *case)


def run_decode_attention(spec: Spec) -> None:
    for name, batch, tokens in itertools.product(shapes.MODELS, BATCHES, QUERIES):
        if batch * tokens <= max(shapes.ROWS):
            decode(spec, name, batch * tokens, tokens)
    for case in MORE_LAYERS:
        decode(spec, *case)


def run_few_rows(spec: Spec) -> None:
    for name, rows in itertools.product(shapes.MODELS, shapes.ROWS):
        layer(spec, name, rows)


def run_sparse_mla(spec: Spec) -> None:
    for name in latent_shapes.LOADS:
        latent(spec, name)


def run_indexer_logits(spec: Spec) -> None:
    distinct = {(load.batch, load.queries, load.table): load for load in indexer_shapes.LOADS}
    for dtype in (jnp.float8_e4m3fn, jnp.bfloat16):
        for heads, load in itertools.product(indexer_shapes.HEADS.values(), distinct.values()):
            indexer(spec, heads, load.batch, load.queries, load.table, indexer_shapes.PAGE_SIZE, dtype)
    for case in MORE_INDEXERS:
        indexer(spec, *case)


def run_topk_indices(spec: Spec) -> None:
    for load in topk_shapes.LOADS:
        topk(spec, load.rows, load.length, load.k)


OPS = {
    "paged_attention": run_paged_attention,
    "decode_attention": run_decode_attention,
    "few_rows": run_few_rows,
    "sparse_mla": run_sparse_mla,
    "indexer_logits": run_indexer_logits,
    "topk_indices": run_topk_indices,
}


def main(op: str) -> None:
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def spec(*shape: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    OPS[op](spec)


if __name__ == "__main__":
    main(sys.argv[1])
