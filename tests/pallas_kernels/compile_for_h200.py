"""Compiles paged attention for an H200 on a machine without one, ptxas' reports on stderr. Run by a test.

h200.txtpb is the target as an H200 machine describes it:
`jax._src.lib.xla_client.get_topology_for_devices(jax.devices()).target_config`.
"""

import os
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from pallas_kernels.paged_attention import api  # noqa: E402
from pallas_kernels.paged_attention.shapes import MODELS, PAGE_SIZE, Load  # noqa: E402

CASES = (
    ("smollm2_135m", Load(batch=64, queries=1, live=160, table=1024)),
    ("smollm2_135m", Load(batch=1, queries=4, live=8192, table=8192)),
    ("mimo_1.4b_bench", Load(batch=64, queries=2, live=160, table=1024)),
    ("llama3_8b", Load(batch=8, queries=4, live=1024, table=1024)),
    ("qwen2_7b", Load(batch=1, queries=9, live=1024, table=1024)),
)


def main() -> None:
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    attend = jax.jit(lambda *operands: api.paged_attention(*operands, implementation="mosaic_gpu"))
    for name, load in CASES:
        heads = MODELS[name]
        cache = (load.batch * load.table // PAGE_SIZE, PAGE_SIZE, heads.kv_heads, heads.width)
        q = (load.batch, load.queries, heads.kv_heads, heads.per_kv, heads.width)
        operands = (
            *((shape, jnp.bfloat16) for shape in (q, cache, cache)),
            ((load.batch, load.table // PAGE_SIZE), jnp.int32),
            ((load.batch, load.queries), jnp.int32),
        )
        specs = [jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in operands]
        memory = attend.lower(*specs).compile().memory_analysis()
        print(name, load, f"temp={memory.temp_size_in_bytes}", flush=True)


if __name__ == "__main__":
    main()
