"""Compiles the kernels for an H200 on a machine without one, ptxas' reports on stderr. Run by a test.

h200.txtpb is the target as an H200 machine describes it:
`jax._src.lib.xla_client.get_topology_for_devices(jax.devices()).target_config`.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from pallas_kernels.decode_attention import decode_attention  # noqa: E402
from pallas_kernels.few_rows import norm_qkv_rope, norm_swiglu, project_add, shapes  # noqa: E402
from pallas_kernels.indexer_logits import indexer_logits  # noqa: E402
from pallas_kernels.paged_attention import paged_attention  # noqa: E402
from pallas_kernels.paged_attention.shapes import MODELS, PAGE_SIZE, Load  # noqa: E402
from pallas_kernels.sparse_mla import shapes as latent_shapes  # noqa: E402
from pallas_kernels.sparse_mla import sparse_mla  # noqa: E402
from pallas_kernels.topk_indices import topk_indices  # noqa: E402

CASES = (
    ("smollm2_135m", Load(batch=64, queries=1, live=160, table=1024)),
    ("smollm2_135m", Load(batch=1, queries=4, live=8192, table=8192)),
    ("mimo_1.4b_bench", Load(batch=64, queries=2, live=160, table=1024)),
    ("llama3_8b", Load(batch=8, queries=4, live=1024, table=1024)),
    ("qwen2_7b", Load(batch=1, queries=9, live=1024, table=1024)),
)


# (model, rows, tokens a sequence)
LAYERS = (("smollm2_135m", 2, 1), ("smollm2_135m", 64, 4), ("mimo_1.4b_bench", 8, 2), ("mimo_7b", 2, 1))

LATENT = ("t64_n128", "t1_n128", "t16_n16")
# (heads, batch, tokens a sequence, positions, page, keys)
INDEXERS = (
    (64, 64, 1, 32768, 64, jnp.float8_e4m3fn),
    (64, 8, 4, 8192, 16, jnp.bfloat16),
    (32, 64, 2, 8192, 32, jnp.float8_e4m3fn),
)
TOPK_ROWS = ((64, 32768), (1, 131072))

Spec = Callable[..., jax.ShapeDtypeStruct]


def compile_one(name: str, run: Callable[..., object], *specs: object, donate: tuple[int, ...] = ()) -> None:
    memory = jax.jit(run, donate_argnums=donate).lower(*specs).compile().memory_analysis()
    assert memory is not None
    print(name, f"temp={memory.temp_size_in_bytes}", flush=True)


def attention(spec: Spec, name: str, load: Load) -> None:
    heads = MODELS[name]
    cache = (load.batch * load.table // PAGE_SIZE, PAGE_SIZE, heads.kv_heads, heads.width)
    compile_one(
        f"{name} {load}",
        functools.partial(paged_attention, implementation="mosaic_gpu"),
        spec(load.batch, load.queries, heads.kv_heads, heads.per_kv, heads.width),
        spec(*cache),
        spec(*cache),
        spec(load.batch, load.table // PAGE_SIZE, dtype=jnp.int32),
        spec(load.batch, load.queries, dtype=jnp.int32),
    )


def layer(spec: Spec, name: str, rows: int, tokens: int) -> None:
    sizes = shapes.MODELS[name]
    weights = {name: spec(*shape) for name, shape in sizes.weights().items()}
    d, g, h = sizes.hidden, sizes.kv_heads, sizes.width
    x, tables = spec(rows, d), (spec(rows, h // 2, dtype=jnp.float32),) * 2
    compile_one(
        f"{name} norm_qkv_rope {rows}",
        functools.partial(norm_qkv_rope, eps=1e-5, implementation="mosaic_gpu"),
        *(x, weights["input_norm"], weights["qkv"], weights.get("qkv_bias"), tables),
    )
    compile_one(
        f"{name} norm_swiglu {rows}",
        functools.partial(norm_swiglu, eps=1e-5, implementation="mosaic_gpu"),
        *(x, weights["post_norm"], weights["gate_up"]),
    )
    for weight in ("o", "down"):
        compile_one(
            f"{name} {weight} {rows}",
            functools.partial(project_add, implementation="mosaic_gpu"),
            *(spec(rows, weights[weight].shape[1]), weights[weight], x),
        )
    batch, pages = rows // tokens, 64
    cache = spec(batch * pages + 4, PAGE_SIZE, g, h)
    compile_one(
        f"{name} decode_attention {batch} x {tokens}",
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


def topk(spec: Spec, rows: int, length: int) -> None:
    compile_one(
        f"topk_indices {rows} x {length}",
        functools.partial(topk_indices, k=2048, implementation="mosaic_gpu"),
        *(spec(rows, length, dtype=jnp.float32), spec(rows, dtype=jnp.int32)),
    )


def main() -> None:
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def spec(*shape: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    for case in CASES:
        attention(spec, *case)
    for case in LAYERS:
        layer(spec, *case)
    for name in LATENT:
        latent(spec, name)
    for case in INDEXERS:
        indexer(spec, *case)
    for case in TOPK_ROWS:
        topk(spec, *case)


if __name__ == "__main__":
    main()
