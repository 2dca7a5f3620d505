"""The gated delta net: against goldens, chunked against stepwise, and exact replay of accepted rows."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.models import delta_net
from mtp_jax.models.delta_net import Changes, DeltaHeads, Journal, Rows
from mtp_jax.models.layers import linear
from tests.oracle import qwen_mtp

GOLDEN = Path(__file__).parents[1] / "golden"
# Rounding of fp32 sums in another order; states and outputs here are of the order of one.
TOLERANCE = 2e-5
HEADS = [DeltaHeads(2, 4, 8, 16), DeltaHeads(3, 3, 16, 8), DeltaHeads(2, 6, 128, 128)]

Steps = Callable[[jax.Array, Rows], tuple[jax.Array, jax.Array, Changes]]
steps: Steps = jax.jit(delta_net.delta_rule_steps)
chunked = jax.jit(delta_net.delta_rule_chunked, static_argnames="chunk")
replay = jax.jit(delta_net.replay)


def random_rows(heads: DeltaHeads, batch: int, count: int, seed: int = 0) -> Rows:
    """Keys alike (so that rows influence each other), heads that forget at once and heads that never do."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((batch, count, heads.num_channels)) + 0.5
    gates = random.standard_normal((2, batch, count, heads.num_value_heads)) * 2
    a_log = np.log(np.geomspace(1e-3, 8, heads.num_value_heads))
    arrays = (jnp.asarray(x, jnp.float32) for x in (mixed, *gates, a_log, np.zeros(heads.num_value_heads)))
    return delta_net.recurrence_rows(*arrays, heads)


def random_state(heads: DeltaHeads, batch: int, seed: int = 1) -> jax.Array:
    noise = np.random.default_rng(seed).standard_normal((batch, *heads.state_shape))
    return jnp.asarray(noise, jnp.float32)


def part(rows: Rows, start: int, stop: int) -> Rows:
    return jax.tree.map(lambda x: x[:, start:stop], rows)


def largest(a: jax.Array | np.ndarray, b: jax.Array | np.ndarray) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


# Forms of the recurrence


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("count", [1, 64, 150])
def test_chunked_is_stepwise(heads: DeltaHeads, count: int) -> None:
    rows, state = random_rows(heads, 2, count), random_state(heads, 2)
    outputs, last, _ = steps(state, rows)
    chunk_outputs, chunk_last = chunked(state, rows)
    assert largest(last, state) > 0.1
    assert largest(chunk_outputs, outputs) < TOLERANCE
    assert largest(chunk_last, last) < TOLERANCE


def test_stepwise_is_the_definition() -> None:
    heads = HEADS[0]
    rows, state = random_rows(heads, 1, 20), random_state(heads, 1)
    outputs, last, _ = steps(state, rows)
    q, k, v, g, beta = (np.asarray(x, np.float64)[0] for x in jax.tree.leaves(rows))
    s, expected = np.asarray(state, np.float64)[0], np.zeros(outputs.shape[1:])
    for t in range(20):
        for head in range(4):
            key, query = k[t, head // 2], q[t, head // 2]
            s[head] *= np.exp(g[t, head])
            s[head] += np.outer(key, beta[t, head] * (v[t, head] - s[head].T @ key))
            expected[t, head] = s[head].T @ query
    assert largest(outputs[0], expected) < TOLERANCE
    assert largest(last[0], s) < TOLERANCE


@pytest.mark.parametrize("cuts", [(1,), (7, 14, 21), (16, 64, 80), (63, 64, 65, 129)])
def test_any_split_is_the_whole(cuts: tuple[int, ...]) -> None:
    """State and window handed from part to part, chunked; the convolution to the bit."""
    heads, count = HEADS[0], 150
    rows, state = random_rows(heads, 2, count), random_state(heads, 2)
    random = np.random.default_rng(2)
    x = jnp.asarray(random.standard_normal((2, count, heads.num_channels)), jnp.float32)
    weight = jnp.asarray(random.standard_normal((heads.num_channels, 4)), jnp.float32)
    window = jnp.zeros((2, 3, heads.num_channels), jnp.float32)
    whole, whole_state, _ = steps(state, rows)
    whole_conv = delta_net.causal_conv(window, x, weight)
    pieces, convolved = [], []
    for start, stop in zip((0, *cuts), (*cuts, count), strict=True):
        out, state = chunked(state, part(rows, start, stop))
        pieces.append(out)
        convolved.append(delta_net.causal_conv(window, x[:, start:stop], weight))
        window = delta_net.advance_window(window, x[:, start:stop], jnp.full(2, stop - start, jnp.int32))
    assert largest(jnp.concatenate(pieces, 1), whole) < TOLERANCE
    assert largest(state, whole_state) < TOLERANCE
    np.testing.assert_array_equal(jnp.concatenate(convolved, 1), whole_conv)


@pytest.mark.parametrize("dilation", [1, 3])
def test_convolution(dilation: int) -> None:
    random = np.random.default_rng(3)
    window, x = random.standard_normal((2, 3 * dilation, 5)), random.standard_normal((2, 11, 5))
    weight = random.standard_normal((5, 4))
    inputs, expected = np.concatenate([window, x], 1), np.zeros(x.shape)
    for t in range(11):
        for tap in range(4):
            expected[:, t] += weight[:, tap] * inputs[:, t + tap * dilation]
    out = delta_net.causal_conv(*(jnp.asarray(a, jnp.float32) for a in (window, x, weight)), dilation)
    assert largest(out, expected) < 1e-5  # four fp32 products


def test_hidden_rows_do_nothing() -> None:
    """Rows without strength and decay, in between and at the end, leave the state and the other outputs alone."""
    heads = HEADS[0]
    rows, state = random_rows(heads, 2, 12), random_state(heads, 2)
    seen = jnp.asarray(np.arange(12) % 3 != 1)
    hidden = Rows(
        rows.query,
        rows.key,
        rows.value,
        jnp.where(seen[:, None], rows.log_decay, 0),
        jnp.where(seen[:, None], rows.strength, 0),
    )
    shorter = jax.tree.map(lambda x: x[:, np.flatnonzero(seen)], rows)
    outputs, last, _ = steps(state, shorter)
    all_outputs, all_last, _ = steps(state, hidden)
    np.testing.assert_array_equal(all_last, last)
    np.testing.assert_array_equal(all_outputs[:, np.flatnonzero(seen)], outputs)
    assert largest(chunked(state, hidden)[1], last) < TOLERANCE


def test_gradients_agree() -> None:
    """Training goes through the chunked form; masked places must not leak into its gradient."""
    heads = HEADS[0]
    rows, state = random_rows(heads, 1, 70), random_state(heads, 1)

    def loss(form: Callable[..., tuple], rows: Rows) -> jax.Array:
        outputs, last, *_ = form(state, rows)
        return jnp.sum(jnp.square(outputs)) + jnp.sum(jnp.square(last))

    stepwise, by_chunk = (jax.jit(jax.grad(lambda r, f=f: loss(f, r)))(rows) for f in (steps, chunked))
    for name in ("query", "key", "value", "log_decay", "strength"):
        a, b = getattr(stepwise, name), getattr(by_chunk, name)
        assert largest(a, b) < TOLERANCE * (1 + float(jnp.abs(a).max())), name


# Replay


def journal_of(heads: DeltaHeads, changes: Changes, count: int, seed: int = 4) -> Journal:
    noise = np.random.default_rng(seed).standard_normal((changes.key.shape[0], count, heads.num_channels))
    return Journal(jnp.asarray(noise, jnp.bfloat16), changes)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 12])
def test_replay_is_having_run_only_these(heads: DeltaHeads, num_rows: int) -> None:
    """Every count at once, one a row; to the bit, although other programs computed the two."""
    batch = num_rows + 1
    rows, state = random_rows(heads, batch, num_rows), random_state(heads, batch)
    _, _, changes = steps(state, rows)
    journal = journal_of(heads, changes, num_rows)
    window = jnp.full((batch, 3, heads.num_channels), 7, jnp.bfloat16)
    new_state, new_window = replay(state, window, journal, jnp.arange(batch, dtype=jnp.int32))
    np.testing.assert_array_equal(new_state[0], state[0])
    for count in range(1, batch):
        _, expected, _ = steps(state, part(rows, 0, count))
        np.testing.assert_array_equal(new_state[count], expected[count])
    inputs = np.concatenate([window, journal.channels], 1)
    for count in range(batch):
        np.testing.assert_array_equal(new_window[count], inputs[count, count : count + 3])


def test_replay_ignores_what_was_rejected() -> None:
    heads = HEADS[0]
    rows, state = random_rows(heads, 3, 4), random_state(heads, 3)
    _, _, changes = steps(state, rows)
    journal, count = journal_of(heads, changes, 4), jnp.asarray([0, 2, 4], jnp.int32)
    window = jnp.zeros((3, 3, heads.num_channels), jnp.bfloat16)
    rejected = np.arange(4) >= np.asarray(count)[:, None]

    def spoil(x: jax.Array) -> jax.Array:
        return jnp.where(rejected.reshape(3, 4, *(1,) * (x.ndim - 2)), jnp.nan, x)

    for a, b in zip(
        replay(state, window, jax.tree.map(spoil, journal), count),
        replay(state, window, journal, count),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_rounds_with_rejections_are_plain_decoding() -> None:
    """Rounds of four rows, of which some stand, end with the very state of one row at a time."""
    heads, batch, length = HEADS[1], 3, 24
    rows, random = random_rows(heads, batch, length), np.random.default_rng(5)
    state = plain = jnp.zeros((batch, *heads.state_shape), jnp.float32)
    for t in range(length):
        _, plain, _ = steps(plain, part(rows, t, t + 1))
    wrong = random_rows(heads, batch, 4, seed=6)
    window = jnp.zeros((batch, 3, heads.num_channels), jnp.bfloat16)
    _, _, changes = steps(state, wrong)
    journal, count = journal_of(heads, changes, 4), jnp.zeros(batch, jnp.int32)
    done = np.zeros(batch, np.int64)
    while (done < length).any() or np.asarray(count).any():
        state, window = replay(state, window, journal, count)
        accepted = np.minimum(random.integers(1, 5, batch), length - done)
        places = np.minimum(done[:, None] + np.arange(4), length - 1)
        stands = np.arange(4) < accepted[:, None]

        def mixture(right: jax.Array, other: jax.Array, places=places, stands=stands) -> jax.Array:
            chosen = right[np.arange(batch)[:, None], places]
            return jnp.where(stands.reshape(batch, 4, *(1,) * (right.ndim - 2)), chosen, other)

        _, _, changes = steps(state, jax.tree.map(mixture, rows, wrong))
        journal, count = journal_of(heads, changes, 4), jnp.asarray(accepted, jnp.int32)
        done += accepted
    np.testing.assert_array_equal(state, plain)


# Goldens: the whole first layer of each family


class FirstLayer:
    """Layer 0 of a tiny checkpoint, its delta net by delta_net.py and the rest by the oracle's NumPy."""

    def __init__(self, name: str):
        self.checkpoint = qwen_mtp.Checkpoint(GOLDEN / name)
        text = self.checkpoint.text
        self.weights = self.checkpoint.part(f"{self.checkpoint.trunk}layers.0.")
        sizes = (
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
        )
        self.heads = DeltaHeads(*(text[size] for size in sizes))
        self.gate = jax.nn.sigmoid if text.get("output_gate_type") == "sigmoid" else jax.nn.silu

    def projections(self) -> list[np.ndarray]:
        """Weights of qkv, z, b and a, whichever way they are packed."""
        w, h = self.weights, self.heads
        if "linear_attn.in_proj_qkv.weight" in w:
            return [w[f"linear_attn.in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
        share = h.num_value_heads // h.num_key_heads
        widths = (h.key_width, h.key_width, share * h.value_width, share * h.value_width)
        *qkv, z = delta_net.interleaved_rows(h.num_key_heads, widths)
        b, a = delta_net.interleaved_rows(h.num_key_heads, (share, share))
        packed, gates = w["linear_attn.in_proj_qkvz.weight"], w["linear_attn.in_proj_ba.weight"]
        return [packed[np.concatenate(qkv)], packed[z], gates[b], gates[a]]

    def delta_net(self, x: np.ndarray, form: Callable[..., tuple]) -> tuple[np.ndarray, jax.Array, jax.Array]:
        """x [n, D] -> output [n, D], last state and window."""
        w = {k.removeprefix("linear_attn."): jnp.asarray(v) for k, v in self.weights.items()}
        qkv, z, b, a = (linear(jnp.asarray(x), jnp.asarray(p))[None] for p in self.projections())
        window = jnp.zeros((1, 3, self.heads.num_channels), jnp.float32)
        mixed = jax.nn.silu(delta_net.causal_conv(window, qkv, w["conv1d.weight"][:, 0]))
        rows = delta_net.recurrence_rows(mixed, b, a, w["A_log"], w["dt_bias"], self.heads)
        out, state, *_ = form(jnp.zeros((1, *self.heads.state_shape), jnp.float32), rows)
        gated = delta_net.gated_rms_norm(
            out, z.reshape(out.shape), w["norm.weight"], self.checkpoint.eps, self.gate
        )
        out = linear(gated.reshape(len(x), -1), w["out_proj.weight"])
        return np.asarray(out), state[0], delta_net.advance_window(window, qkv, jnp.full(1, len(x)))[0]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        weight = jnp.asarray(self.weights[f"{name}.weight"])
        return np.asarray(delta_net.zero_centred_rms_norm(jnp.asarray(x), weight, self.checkpoint.eps))

    def feed_forward(self, x: np.ndarray) -> np.ndarray:
        w = {k.removeprefix("mlp."): v for k, v in self.weights.items() if k.startswith("mlp.")}
        return qwen_mtp.feed_forward(self.checkpoint, w, x)


@pytest.mark.parametrize("form", [steps, chunked], ids=["stepwise", "chunked"])
@pytest.mark.parametrize("name", ["tiny_qwen3_next", "tiny_qwen3_5", "tiny_qwen3_5_moe"])
def test_first_layer(name: str, form: Callable[..., tuple]) -> None:
    with np.load(GOLDEN / f"{name}.npz") as stored:
        golden = dict(stored)
    layer = FirstLayer(name)
    x = layer.checkpoint.embedding[golden["ids"]]
    out, state, window = layer.delta_net(layer.norm("input_layernorm", x), form)
    x = x + out
    x = x + layer.feed_forward(layer.norm("post_attention_layernorm", x))
    errors = [largest(x, golden["layers"][0]), largest(state, golden["state"])]
    print(name, [f"{error:.1e}" for error in errors])
    assert max(errors) < TOLERANCE
    assert largest(window, golden["window"]) < TOLERANCE


@pytest.mark.parametrize("form", [steps, chunked], ids=["stepwise", "chunked"])
def test_first_layer_with_streams(form: Callable[..., tuple]) -> None:
    """Qwen4Exp: four streams around the sub-layers, and a sigmoid at the delta net's output."""
    with np.load(GOLDEN / "tiny_qwen4_exp.npz") as stored:
        golden = dict(stored)
    layer = FirstLayer("tiny_qwen4_exp")
    w, n, sigmoid = layer.weights, len(golden["ids"]), qwen_mtp.sigmoid

    def mix(which: str, streams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        prefix = f"{which}_hyper_connection."
        scale = 1 + w[f"{prefix}hc_norm.weight"].reshape(4, -1)
        rms = np.sqrt(np.mean(streams**2, -1, keepdims=True) + np.float32(layer.checkpoint.eps))
        normed = streams / rms * scale
        flat = normed.reshape(n, -1)
        low = qwen_mtp.silu(flat @ w[f"{prefix}input_mix_weight_down.weight"].T / 4)
        gate = sigmoid(low @ w[f"{prefix}input_mix_weight_up.weight"].T).reshape(streams.shape)
        inject = 2 * sigmoid(flat @ w[f"{prefix}block_inject_weight.weight"].T / 4)
        return (gate * normed).mean(1), inject[..., None]

    streams = np.repeat(layer.checkpoint.embedding[golden["ids"]][:, None], 4, 1)
    x, inject = mix("attn", streams)
    out, state, window = layer.delta_net(x, form)
    streams = streams + inject * out[:, None]
    x, inject = mix("mlp", streams)
    streams = streams + inject * layer.feed_forward(x)[:, None]
    assert largest(streams.reshape(n, -1), golden["layers"][0]) < TOLERANCE
    assert largest(state, golden["state"]) < TOLERANCE
    assert largest(window, golden["window"]) < TOLERANCE
