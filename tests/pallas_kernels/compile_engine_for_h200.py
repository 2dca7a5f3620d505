"""Compiles the engine's decode step for H200s on a machine without one, and prints what it is. Run by a test.

python tests/pallas_kernels/compile_engine_for_h200.py STAGES LAYERS DRAFTS
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from mtp_jax.config import EngineConfig, ModelConfig  # noqa: E402
from mtp_jax.engine.buckets import Bucket, Sampling  # noqa: E402
from mtp_jax.engine.plan_arrays import PLAN_SPEC, PlanWriter  # noqa: E402
from mtp_jax.engine.stand_ins import idle_plan  # noqa: E402
from mtp_jax.engine.state import state_shapes, state_specs  # noqa: E402
from mtp_jax.engine.step import Program, dividing_sizes  # noqa: E402
from mtp_jax.engine.weights import WeightLayout  # noqa: E402
from pallas_kernels.decode_attention import api as decode_api  # noqa: E402
from pallas_kernels.few_rows import api as few_rows_api  # noqa: E402
from sharding.mesh import make_mesh  # noqa: E402
from sharding.placement import make_placement  # noqa: E402
from sharding.stage_plan import balanced_plan  # noqa: E402

MODEL = ModelConfig(
    "mimo",
    vocab_size=1024,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=512,
    attention_bias=True,
    num_nextn_predict_layers=1,
    max_position_embeddings=2048,
)
ROWS = 2


def main(stages: int, layers: int, drafts: int) -> None:
    decode_api.on_hopper = few_rows_api.on_hopper = lambda: True
    model = dataclasses.replace(MODEL, num_hidden_layers=layers)
    config = EngineConfig(
        stages=stages,
        max_num_seqs=ROWS * stages,
        max_model_len=1024,
        num_pages=4096,
        num_speculative_tokens=drafts,
        dtype="bfloat16",
    )
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{stages}")
    mesh, plan = make_mesh(stages, devices=topology.devices), balanced_plan(layers, stages)
    placement = make_placement(mesh, dividing_sizes(model))
    layout = WeightLayout(model, plan, placement, jnp.dtype("bfloat16"), drafts > 0)
    bucket = Bucket(1, ROWS, 64, 0, drafts, Sampling.GREEDY)
    here = make_placement(make_mesh(1), dividing_sizes(model))  # arrays need a device that is there
    idle = PlanWriter(config, here).write(idle_plan(bucket, config), bucket)

    def placed(array: jax.Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    weights = jax.tree.map(placed, layout.shapes(), layout.specs())
    state = jax.tree.map(placed, state_shapes(layout, config), state_specs(layout, config))
    arrays = jax.tree.map(lambda x: placed(x, PLAN_SPEC), idle)
    compiled = Program(config, layout).step(bucket).lower(weights, state, arrays).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    if len(sys.argv) > 4:
        Path(sys.argv[4]).write_text(text)
    cache = 2 * config.num_pages * config.page_size * model.num_key_value_heads * model.head_dim
    print(
        json.dumps(
            {
                "kernels": text.count('custom_call_target="mosaic_gpu'),
                "temporaries": memory.temp_size_in_bytes,
                "aliased": memory.alias_size_in_bytes,
                "one_cache": cache,
            }
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
