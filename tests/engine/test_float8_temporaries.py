"""A step over float8 weights never holds them all dequantised."""

import dataclasses
import math

import jax

from mtp_jax.engine.buckets import Bucket
from mtp_jax.engine.memory import measure
from mtp_jax.engine.step import Program
from mtp_jax.engine.weights import with_float8
from mtp_jax.models.registry import expected_tensors
from mtp_jax.models.scaled import BlockScaled
from tests.parity.rig import TINY, RandomSource, blueprint, compile_bucket

BLOCK = 128
MODEL = dataclasses.replace(
    TINY,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=1024,
    max_position_embeddings=64,
)


def test_temporaries_are_those_of_a_layer() -> None:
    drawn = blueprint(RandomSource(MODEL), num_pages=16, max_num_seqs=2, max_model_len=32, prefill_chunk=8)
    config, plain = drawn.config, drawn.program.layout
    shapes = expected_tensors(MODEL)
    layout = with_float8(plain, {name: BLOCK for name, shape in shapes.items() if len(shape) == 2})
    leaves = jax.tree.leaves(layout.shapes().trunk, is_leaf=lambda leaf: isinstance(leaf, BlockScaled))
    matrices = [math.prod(leaf.shape) for leaf in leaves if isinstance(leaf, BlockScaled)]
    layer = 4 * sum(matrices) // MODEL.num_hidden_layers  # bytes of a dequantised one: the engine's float32
    # float32 codes have 4 bytes, float8 codes 1, and 4 bytes more for 128 of them (64 in the projection of
    # heads of 64). Norms and biases are little beside them.
    assert 0.25 < measure(layout, config).trunk / measure(plain, config).trunk < 0.28
    drawn = dataclasses.replace(drawn, program=Program(config, layout))
    bucket = Bucket(rounds=2, rows=2, width=8, chunk=0, drafts=2)
    memory = compile_bucket(drawn, bucket).memory_analysis()
    assert memory is not None
    temporaries = memory.temp_size_in_bytes
    print(f"temporaries {temporaries / layer:.2f} of a layer's {layer / 2**20:.1f} MiB")
    # One matrix after the other: the largest is half a layer. All layers would be six, and the MTP module one
    # more: so it is where dequantising does not wait for the rows that it is for.
    assert temporaries < layer
