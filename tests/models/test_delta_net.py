"""The gated delta net: its forms against the definition, exact replay of accepted rows, and goldens."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtp_jax.models import delta_net
from mtp_jax.models.delta_net import Changes, DeltaHeads, Journal, Rows
from mtp_jax.models.layers import linear, rms_norm
from tests.oracle import qwen_mtp

GOLDEN = Path(__file__).parents[1] / "golden"
# Rounding of fp32 sums in another order; states and outputs here are of the order of one.
TOLERANCE = 2e-5
HEADS = [DeltaHeads(2, 4, 8, 16), DeltaHeads(3, 3, 16, 8), DeltaHeads(1, 2, 128, 128)]
ROUND = 4

steps = jax.jit(delta_net.delta_rule_steps)
chunked = jax.jit(delta_net.delta_rule_chunked)
replay = jax.jit(delta_net.replay)
convolve = jax.jit(delta_net.causal_conv, static_argnums=3)
advance = jax.jit(delta_net.advance_window)
centred = jax.jit(lambda x, weight, eps: rms_norm(x, 1 + weight, eps), static_argnums=2)
rows_of = jax.jit(delta_net.recurrence_rows, static_argnums=5)


def random_rows(heads: DeltaHeads, batch: int, count: int, seed: int = 0) -> Rows:
    """Keys alike (so that rows influence each other), heads that forget at once and heads that never do."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((batch, count, heads.num_channels)) + 0.5
    gates = random.standard_normal((2, batch, count, heads.num_value_heads)) * 2
    a_log = np.log(np.geomspace(1e-3, 8, heads.num_value_heads))
    arrays = (x.astype(np.float32) for x in (mixed, *gates, a_log, np.zeros(heads.num_value_heads)))
    return jax.device_get(rows_of(*arrays, heads))


def random_state(heads: DeltaHeads, batch: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, *heads.state_shape), np.float32)


def part(rows: Rows, start: int, stop: int) -> Rows:
    return jax.tree.map(lambda x: x[:, start:stop], rows)


def largest(a: jax.Array | np.ndarray, b: jax.Array | np.ndarray) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def definition(state: jax.Array, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and last state, row by row in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in jax.tree.leaves(rows))
    s, outputs = np.asarray(state, np.float64).copy(), np.zeros(v.shape)
    share = s.shape[1] // k.shape[2]
    for t in range(k.shape[1]):
        key, query = (np.repeat(x[:, t], share, axis=1) for x in (k, q))  # B IJ X
        s *= np.exp(g[:, t])[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhxy,bhx->bhy", s, key))
        s += np.einsum("bhx,bhy->bhxy", key, delta)
        outputs[:, t] = np.einsum("bhxy,bhx->bhy", s, query)
    return outputs, s


def journal_of(heads: DeltaHeads, changes: Changes, seed: int = 4) -> Journal:
    noise = np.random.default_rng(seed).standard_normal((*changes.key.shape[:2], heads.num_channels))
    return Journal(noise.astype(jnp.bfloat16), changes)


def blank_window(heads: DeltaHeads, batch: int) -> np.ndarray:
    return np.full((batch, 3, heads.num_channels), 7, jnp.bfloat16)


@jax.jit
def stepwise(state: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Outputs and last state by rounds of ROUND rows, all of which stand; the last round filled up."""
    batch, count = rows.key.shape[:2]

    def by_round(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, -count % ROUND)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, ROUND, *x.shape[2:]), 1, 0)

    def step(state: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        outputs, changes = delta_net.delta_rule_steps(state, rows)
        journal = Journal(jnp.zeros((batch, ROUND, 1), jnp.float32), changes)
        window, all_stand = jnp.zeros((batch, 3, 1), jnp.float32), jnp.full(batch, ROUND, jnp.int32)
        return delta_net.replay(state, window, journal, all_stand)[0], outputs

    last, outputs = jax.lax.scan(step, state, jax.tree.map(by_round, rows))
    outputs = jnp.moveaxis(outputs, 0, 1)
    return outputs.reshape(batch, -1, *outputs.shape[3:])[:, :count], last


# Forms of the recurrence


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_both_forms_are_the_definition(heads: DeltaHeads) -> None:
    rows, state = random_rows(heads, 2, 150), random_state(heads, 2)
    outputs, last = definition(state, rows)
    assert largest(last, state) > 0.1
    for form in (stepwise, chunked):
        form_outputs, form_last = form(state, rows)
        assert largest(form_outputs, outputs) < TOLERANCE
        assert largest(form_last, last) < TOLERANCE


@pytest.mark.parametrize("cuts", [(1,), (16, 32, 48, 64), (64,)])
def test_any_split_is_the_whole(cuts: tuple[int, ...]) -> None:
    """State and window handed from part to part; the convolution to the bit."""
    heads, count = HEADS[0], 80
    rows, state = random_rows(heads, 2, count), random_state(heads, 2)
    random = np.random.default_rng(2)
    x = random.standard_normal((2, count, heads.num_channels), np.float32)
    weight = random.standard_normal((heads.num_channels, 4), np.float32)
    window = np.zeros((2, 3, heads.num_channels), np.float32)
    whole, whole_state = definition(state, rows)
    whole_conv = convolve(window, x, weight, 1)
    pieces, convolved = [], []
    for start, stop in zip((0, *cuts), (*cuts, count), strict=True):
        out, state = chunked(state, part(rows, start, stop))
        pieces.append(out)
        convolved.append(convolve(window, x[:, start:stop], weight, 1))
        window = advance(window, x[:, start:stop], np.full(2, stop - start, np.int32))
    assert largest(np.concatenate(pieces, 1), whole) < TOLERANCE
    assert largest(state, whole_state) < TOLERANCE
    np.testing.assert_array_equal(np.concatenate(convolved, 1), whole_conv)


@pytest.mark.parametrize("dilation", [1, 3])
def test_convolution(dilation: int) -> None:
    random = np.random.default_rng(3)
    window, x = random.standard_normal((2, 3 * dilation, 5)), random.standard_normal((2, 11, 5))
    weight = random.standard_normal((5, 4))
    inputs, expected = np.concatenate([window, x], 1), np.zeros(x.shape)
    for t in range(11):
        for tap in range(4):
            expected[:, t] += weight[:, tap] * inputs[:, t + tap * dilation]
    out = convolve(*(a.astype(np.float32) for a in (window, x, weight)), dilation)
    assert largest(out, expected) < 1e-5  # four fp32 products


def hide(rows: Rows, hidden: np.ndarray) -> Rows:
    """Rows of which those marked in hidden [B, T] hold no token."""
    shown = (~hidden[..., None]).astype(np.float32)
    return dataclasses.replace(rows, log_decay=rows.log_decay * shown, strength=rows.strength * shown)


def test_hidden_rows_do_nothing() -> None:
    heads = HEADS[0]
    rows, state = random_rows(heads, 2, 12), random_state(heads, 2)
    seen = np.arange(12) % 3 != 1
    rows_seen = jax.tree.map(lambda x: x[:, np.flatnonzero(seen)], rows)
    outputs, last = definition(state, rows_seen)
    for form in (stepwise, chunked):
        all_outputs, all_last = form(state, hide(rows, np.tile(~seen, (2, 1))))
        assert largest(all_outputs[:, np.flatnonzero(seen)], outputs) < TOLERANCE
        assert largest(all_last, last) < TOLERANCE
        np.testing.assert_array_equal(form(state, hide(rows, np.ones((2, 12), bool)))[1], state)


def test_gradient() -> None:
    """Training goes through the chunked form; what its masks hide must not leak into the gradient."""
    heads = HEADS[0]
    rows, state = random_rows(heads, 1, 70), random_state(heads, 1)

    def loss(rows: Rows) -> jax.Array:
        outputs, last = delta_net.delta_rule_chunked(state, rows)
        return jnp.sum(jnp.square(outputs)) + jnp.sum(jnp.square(last))

    gradient = jax.jit(jax.grad(loss))(rows)
    random = np.random.default_rng(7)
    direction = jax.tree.map(lambda x: random.standard_normal(x.shape), rows)
    step = 1e-5

    def shifted(sign: int) -> float:
        moved = jax.tree.map(lambda x, d: np.asarray(x, np.float64) + sign * step * d, rows, direction)
        outputs, last = definition(state, moved)
        return float((outputs**2).sum() + (last**2).sum())

    slope = (shifted(1) - shifted(-1)) / (2 * step)
    products = jax.tree.map(lambda g, d: float((np.asarray(g, np.float64) * d).sum()), gradient, direction)
    # fp32 sums against a central difference in float64
    assert sum(jax.tree.leaves(products)) == pytest.approx(slope, rel=1e-4)


def test_heads_over_devices() -> None:
    """Every form inside shard_map, key heads with their value heads on a device; no collective is needed."""
    heads = HEADS[0]
    rows, state = random_rows(heads, 2, ROUND), random_state(heads, 2)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    by_head, of_state = P(None, None, "tensor"), P(None, "tensor")
    for form in (stepwise, chunked):
        spread = jax.shard_map(
            form, mesh=mesh, in_specs=(of_state, by_head), out_specs=(by_head, of_state), check_vma=True
        )
        for got, expected in zip(jax.jit(spread)(state, rows), form(state, rows), strict=True):
            assert largest(got, expected) < TOLERANCE


# Replay


@pytest.mark.parametrize(("heads", "num_rows"), [(HEADS[0], 1), (HEADS[1], 6), (HEADS[2], ROUND)], ids=str)
def test_replay_is_having_run_only_these(heads: DeltaHeads, num_rows: int) -> None:
    """Every count at once, one a row: to the bit, a round in which the other rows held no token."""
    batch = num_rows + 1
    rows, state = random_rows(heads, batch, num_rows), random_state(heads, batch)
    count = np.arange(batch, dtype=np.int32)
    journal = journal_of(heads, steps(state, rows)[1])
    new_state, new_window = replay(state, blank_window(heads, batch), journal, count)
    fewer = hide(rows, np.arange(num_rows) >= count[:, None])
    alone = journal_of(heads, steps(state, fewer)[1])
    whole = np.full(batch, num_rows, np.int32)
    np.testing.assert_array_equal(new_state, replay(state, blank_window(heads, batch), alone, whole)[0])
    assert largest(new_state, definition(state, fewer)[1]) < TOLERANCE
    np.testing.assert_array_equal(new_state[0], state[0])
    inputs = np.concatenate([blank_window(heads, batch), journal.channels], 1)
    for row in range(batch):
        np.testing.assert_array_equal(new_window[row], inputs[row, row : row + 3])


def test_rows_do_not_see_later_ones() -> None:
    heads = HEADS[0]
    rows, state = random_rows(heads, 1, ROUND), random_state(heads, 1)
    later = np.arange(ROUND) >= 2
    spoilt = jax.tree.map(
        lambda x: np.where(later.reshape(1, -1, *(1,) * (x.ndim - 2)), np.float32(np.nan), x), rows
    )
    outputs, _ = steps(state, rows)
    np.testing.assert_array_equal(steps(state, spoilt)[0][:, :2], outputs[:, :2])


def rounds(heads: DeltaHeads, rows: Rows, wrong: Callable[[Rows, np.ndarray], Rows]) -> jax.Array:
    """The state after all rows, in rounds of which some stand and the rest is what `wrong` makes of it."""
    batch, length = rows.key.shape[:2]
    random, done = np.random.default_rng(5), np.zeros(batch, np.int64)
    state, window = random_state(heads, batch), blank_window(heads, batch)
    while (done < length).any():
        accepted = np.minimum(random.integers(1, ROUND + 1, batch), length - done)
        places = np.minimum(done[:, None] + np.arange(ROUND), length - 1)
        offered = jax.tree.map(lambda x, places=places: x[np.arange(batch)[:, None], places], rows)
        _, changes = steps(state, wrong(offered, np.arange(ROUND) >= accepted[:, None]))
        journal = journal_of(heads, changes)
        state, window = replay(state, window, journal, accepted.astype(np.int32))
        done += accepted
    return state


def test_rejected_rows_leave_no_trace() -> None:
    """Whatever they were, even not numbers; and the state is that of the accepted rows."""
    heads = HEADS[1]
    rows, others = random_rows(heads, 3, 24), random_rows(heads, 3, ROUND, seed=6)

    def replaced(rows: Rows, rejected: np.ndarray, by: Rows) -> Rows:
        def choose(x: np.ndarray, other: np.ndarray) -> np.ndarray:
            return np.where(rejected.reshape(*rejected.shape, *(1,) * (x.ndim - 2)), other, x)

        return jax.tree.map(choose, rows, by)

    nothing = jax.tree.map(lambda x: np.full_like(x, np.nan), others)
    absent = rounds(heads, rows, hide)
    np.testing.assert_array_equal(rounds(heads, rows, lambda r, at: replaced(r, at, others)), absent)
    np.testing.assert_array_equal(rounds(heads, rows, lambda r, at: replaced(r, at, nothing)), absent)
    assert largest(absent, definition(random_state(heads, 3), rows)[1]) < TOLERANCE


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

    def delta_net(self, x: np.ndarray, form: Callable[..., tuple]) -> list[np.ndarray]:
        """x [n, D] -> output [n, D], last state and window."""
        weights = {k.removeprefix("linear_attn."): v for k, v in self.weights.items()}

        @jax.jit
        def run(x: jax.Array, w: dict[str, jax.Array], parts: list[jax.Array]) -> tuple[jax.Array, ...]:
            qkv, z, b, a = (linear(x, part)[None] for part in parts)
            window = jnp.zeros((1, 3, self.heads.num_channels), jnp.float32)
            mixed = jax.nn.silu(delta_net.causal_conv(window, qkv, w["conv1d.weight"][:, 0]))
            rows = delta_net.recurrence_rows(mixed, b, a, w["A_log"], w["dt_bias"], self.heads)
            out, state = form(jnp.zeros((1, *self.heads.state_shape), jnp.float32), rows)
            z, eps = z.reshape(out.shape), self.checkpoint.eps
            gated = delta_net.gated_rms_norm(out, z, w["norm.weight"], eps, self.gate)
            out = linear(gated.reshape(len(x), -1), w["out_proj.weight"])
            window = delta_net.advance_window(window, qkv, jnp.full(1, len(x), jnp.int32))
            return out, state[0], window[0]

        return [np.asarray(y) for y in run(x, weights, self.projections())]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(centred(x, self.weights[f"{name}.weight"], self.checkpoint.eps))

    def feed_forward(self, x: np.ndarray) -> np.ndarray:
        w = {k.removeprefix("mlp."): v for k, v in self.weights.items() if k.startswith("mlp.")}
        return qwen_mtp.feed_forward(self.checkpoint, w, x)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("tiny_qwen3_next", chunked),
        ("tiny_qwen3_5", chunked),  # 80 tokens: two chunks
        ("tiny_qwen3_5", stepwise),
        ("tiny_qwen3_5_moe", chunked),
    ],
)
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


def test_first_layer_with_streams() -> None:
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
    out, state, window = layer.delta_net(x, stepwise)
    streams = streams + inject * out[:, None]
    x, inject = mix("mlp", streams)
    streams = streams + inject * layer.feed_forward(x)[:, None]
    assert largest(streams.reshape(n, -1), golden["layers"][0]) < TOLERANCE
    assert largest(state, golden["state"]) < TOLERANCE
    assert largest(window, golden["window"]) < TOLERANCE
