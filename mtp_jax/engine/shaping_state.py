"""What shaped requests carry between rounds. See `engine.shaping`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mtp_jax.engine.trees import stand_in
from sharding.placement import Placement

MAX_BAD_WORDS = 64  # sequences of several tokens, a slot; single tokens are banned in the bias
MAX_BAD_WORD_TOKENS = 16
ANY_TOKEN, NO_TOKEN = -2, -1  # in a bad word: fits everything (left padding); in a text: nothing there
# Marks of a token: how often it was emitted, and above that two flags.
COUNT, IS_STOP, IN_PROMPT = (1 << 29) - 1, 1 << 29, 1 << 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShapingState:
    """Per request slot, split by replica; [U, V] arrays are split along V too, over padded ids."""

    generation: jax.Array  # U int32    that the slot's part was installed for
    bias: jax.Array  # U V float32      added to logits; -inf where a token is not allowed
    marks: jax.Array  # U V int32       count and flags
    tail: jax.Array  # U MAX_BAD_WORD_TOKENS - 1 int32  last emitted tokens, the latest last
    bad_words: jax.Array  # U MAX_BAD_WORDS MAX_BAD_WORD_TOKENS int32  padded to the left; all -1: none
    min_total: jax.Array  # U int32     tokens, prompt included, before which no stop token is sampled
    min_p: jax.Array  # U float32       0: off
    presence: jax.Array  # U float32    0: off
    frequency: jax.Array  # U float32   0: off
    repetition: jax.Array  # U float32  1: off


def shaping_specs(placement: Placement) -> ShapingState:
    """PartitionSpecs."""
    return _specs(placement.spec("replica"), placement.spec("replica", "vocab"))


def slot_specs(placement: Placement) -> ShapingState:
    """The same of one slot's rows."""
    return _specs(placement.spec(), placement.spec("vocab"))


def _specs(whole: PartitionSpec, spread: PartitionSpec) -> ShapingState:
    one, split = stand_in(whole), stand_in(spread)
    return ShapingState(one, split, split, one, one, one, one, one, one, one)


def shaping_shapes(num_slots: int, padded_vocab: int) -> ShapingState:
    """ShapeDtypeStructs."""

    def array(*shape: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.Array:
        return stand_in(jax.ShapeDtypeStruct((num_slots, *shape), dtype))

    number = array(dtype=jnp.float32)
    return ShapingState(
        generation=array(),
        bias=array(padded_vocab, dtype=jnp.float32),
        marks=array(padded_vocab),
        tail=array(MAX_BAD_WORD_TOKENS - 1),
        bad_words=array(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
        min_total=array(),
        min_p=number,
        presence=number,
        frequency=number,
        repetition=number,
    )
