"""The trainer's trunk and unroll have the numbers of transformers + torch (the golden files)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.config import ModelConfig
from mtp_jax.loading import resolve_model
from mtp_jax.models.registry import mtp_prefix, mtp_table
from mtp_jax.train.losses import logits
from mtp_jax.train.trunk import Packed, Target, hidden_states, read_target
from mtp_jax.train.unroll import Params, draft_outputs
from tests.house.source import ROOT

GOLDEN = ROOT / "tests" / "golden"
# As in tests/parity/test_goldens.py: fp32 on both sides, sums in another order.
TOLERANCE = 1e-3


def one_sample_a_row(rows: list[np.ndarray]) -> Packed:
    length = max(map(len, rows))
    tokens = np.zeros((len(rows), length), np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
        positions[row, : len(ids)] = np.arange(len(ids))
    return Packed(*map(jnp.asarray, (tokens, segments, positions, segments > 0, segments > 0)))


def load(name: str) -> tuple[ModelConfig, Target, dict[str, np.ndarray]]:
    source = resolve_model(GOLDEN / name)
    target = read_target(
        source.config, source.read, jnp.dtype("float32"), lambda done, total: None, source.names()
    )
    return source.config, jax.tree.map(jnp.asarray, target), dict(np.load(GOLDEN / f"{name}.npz"))


# A family of each kind of attention runs in CI, the others in the full run.
SPARSE, HYBRID = "tiny_glm_moe_dsa", "tiny_qwen3_5_moe"
OTHERS = ("tiny_deepseek_v3", "tiny_deepseek_v32", "tiny_glm4_moe", "tiny_qwen3_next", "tiny_qwen3_5")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


@pytest.mark.parametrize("name", ["tiny_llama3", "tiny_qwen2", SPARSE, HYBRID, *SLOW])
def test_the_trunk(name: str) -> None:
    """Behind another segment of the row: positions and attention start anew."""
    config, target, golden = load(name)
    ids = golden["ids"]
    both = one_sample_a_row([np.concatenate([ids[:5], ids])])
    second = jnp.arange(5 + len(ids)) >= 5
    places = jnp.where(second, both.positions - 5, both.positions)
    rows = Packed(both.tokens, both.segments + second.astype(jnp.int32), places, both.loss_mask, both.greedy)
    hidden = jax.jit(lambda t: hidden_states(config, t, rows, "xla"))(target)[0, 5:]
    assert np.abs(hidden - golden["hidden"]).max() < TOLERANCE
    assert np.abs(logits(hidden, target.head) - golden["logits"]).max() < TOLERANCE


@functools.partial(jax.jit, static_argnums=0)
def unroll(config: ModelConfig, target: Target, params: Params, rows: Packed) -> jax.Array:
    hidden = hidden_states(config, target, rows, "xla")
    return draft_outputs(config, params, hidden, target.embedding[rows.tokens], rows, 3, "xla")


@pytest.mark.parametrize("name", ["tiny_mimo", SPARSE, pytest.param(HYBRID, marks=pytest.mark.slow), *SLOW])
def test_the_unroll(name: str) -> None:
    """A row for each anchor of the reference: the text up to the token behind it, then what was drafted."""
    config, target, golden = load(name)
    source, ids = resolve_model(GOLDEN / name), golden["ids"]
    prefix, names = mtp_prefix(config), source.names()
    params = {leaf.name: jnp.asarray(leaf.read(source.read, prefix, names)) for leaf in mtp_table(config)}
    chains = [
        np.concatenate([ids[: anchor + 2], drafts[:2]])
        for anchor, drafts in zip(golden["anchors"], golden["draft_ids"], strict=True)
    ]
    outputs = np.asarray(unroll(config, target, params, one_sample_a_row(chains)))
    for row, anchor in enumerate(golden["anchors"]):
        assert np.abs(outputs[:, row, anchor] - golden["draft_hidden"][row]).max() < TOLERANCE
    last = len(golden["anchors"]) - 1  # the row that has the whole text
    assert np.abs(outputs[0, last, : len(ids) - 1] - golden["mtp_hidden"]).max() < TOLERANCE
