"""Where a module starts, and which tokens it drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.train.initial import draft_vocabulary, initial_params, stream_size
from mtp_jax.train.trunk import hidden_states, residual_stream
from mtp_jax.train.unroll import draft_outputs
from tests.train.models import LLAMA, pack, target_of

ROWS = pack([[9, 4]], prompts=2, length=13, vocab=LLAMA.vocab_size)


def test_the_last_layers_start_hands_the_hidden_state_through() -> None:
    """Without the embedding and what the layer adds, the module's output is its input."""
    target = target_of(LLAMA)
    params = initial_params(LLAMA, target, "last-layer", 0, ROWS)
    silent = params | {name: jnp.zeros_like(params[name]) for name in ("layer.attention.o", "layer.ffn.down")}
    silent["input_proj"] = params["input_proj"].at[:, LLAMA.hidden_size :].set(0)
    hidden = hidden_states(LLAMA, target, ROWS, "xla")
    embedding = target.embedding[ROWS.tokens]
    output = draft_outputs(LLAMA, silent, hidden, embedding, ROWS, 1, "xla")[0]
    # The module's own norms divide by sizes that the target's eps of 1e-6 shifts by as much.
    np.testing.assert_allclose(output, hidden, rtol=1e-4, atol=1e-5)


def test_the_last_layer_is_the_targets() -> None:
    """Its inputs are normed, so only its outputs are scaled: by the size of the stream they were made for."""
    target = target_of(LLAMA)
    params = initial_params(LLAMA, target, "last-layer", 0, ROWS)
    size = stream_size(LLAMA, target, ROWS)
    before = jax.tree.map(lambda x: x[:-1], target.layers)
    stream = residual_stream(
        LLAMA, target.__class__(before, target.embedding, None, target.final_norm), ROWS, "xla"
    )
    assert size == pytest.approx(float(np.median(np.sqrt(np.mean(np.square(stream), axis=-1)))), rel=1e-5)
    for name, leaf in target.layers[0].items():
        scale = size if name.endswith((".o", ".down")) else 1.0
        np.testing.assert_allclose(params[f"layer.{name}"] * scale, leaf[-1], rtol=1e-6)


def test_a_random_start_is_the_seeds() -> None:
    target = target_of(LLAMA)
    first, again, other = (initial_params(LLAMA, target, "random", seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first["layer.attention.qkv"], again["layer.attention.qkv"])
    assert not np.array_equal(first["layer.attention.qkv"], other["layer.attention.qkv"])


def test_draft_vocabulary() -> None:
    counts = np.array([5, 0, 7, 5, 9, 1])
    ids = draft_vocabulary(counts, 3)
    assert ids is not None and ids.dtype == np.int32
    assert ids.tolist() == [0, 2, 4]  # of equal ones the first
    assert draft_vocabulary(counts, 0) is None
    assert draft_vocabulary(counts, 6) is None and draft_vocabulary(counts, 8192) is None
