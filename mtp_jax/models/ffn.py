"""Feed-forward blocks, pre-norm: SwiGLU, and mixtures of such experts. Experts drop no token."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mtp_jax.config import ExpertsConfig, ModelConfig
from mtp_jax.models.layers import Around, linear, norm_swiglu, product, project_add, rms_norm
from mtp_jax.models.leaves import Leaf, Make, halves, never_float8, norm, plain, whole
from mtp_jax.models.scaled import Weight, dense

FEW_ROWS = 64  # up to these, all experts work on all tokens: `ragged_dot` on a GPU copies all their weights
# x [rows, in] times weight [expert, out, in], for rows sorted by expert.
_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x); gate and up are one product."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        table = {leaf.path[0]: leaf for leaf in self.leaves(config)}

        def parameter(name: str) -> nnx.Param:
            return nnx.Param(make(table[name].shape, table[name].dtype or dtype))

        self.eps = config.rms_norm_eps
        self.post_norm = parameter("post_norm")
        self.gate_up, self.down = parameter("gate_up"), parameter("down")

    def __call__(self, x: jax.Array, around: Around) -> jax.Array:
        """x [M, D] -> x + ffn [M, D]."""
        act = norm_swiglu(x, self.post_norm[...], self.gate_up[...], self.eps, around.kernels)
        return project_add(act, self.down[...], x, around.sum_ffn, around.kernels)

    @staticmethod
    def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Its weights; ffn columns are the logical axis `ffn`."""
        d, f = config.hidden_size, config.intermediate_size
        return (
            norm("post_norm", d, "post_attention_layernorm.weight", config.zero_centred_norms),
            _gate_up("gate_up", "mlp.", f, d),
            plain("down", (d, f), (None, "ffn"), "mlp.down_proj.weight"),
        )


class Experts(nnx.Module):
    """The best few of many SwiGLU experts a token, and one that every token uses."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, make: Make):
        experts = _experts(config)
        shapes = {leaf.path[0]: leaf for leaf in self.leaves(config)}

        def parameter(name: str) -> nnx.Param | None:
            leaf = shapes.get(name)
            return None if leaf is None else nnx.Param(make(leaf.shape, leaf.dtype or dtype))

        self.experts = experts
        self.eps = config.rms_norm_eps
        self.post_norm = parameter("post_norm")
        self.router, self.router_bias = parameter("router"), parameter("router_bias")
        self.gate_up, self.down = parameter("gate_up"), parameter("down")
        self.shared_gate_up, self.shared_down = parameter("shared_gate_up"), parameter("shared_down")
        self.shared_gate = parameter("shared_gate")

    def __call__(self, x: jax.Array, around: Around) -> jax.Array:
        """x [M, D] -> x + ffn [M, D].

        Without a norm of its own it takes what hyper-connections give, and returns no sum with it.
        """
        assert self.router is not None and self.gate_up is not None and self.down is not None
        normed = x if self.post_norm is None else rms_norm(x, self.post_norm[...], self.eps)
        with jax.named_scope("router"):
            rows = around.sum_experts.gather(normed)
            wide = rows.astype(jnp.float32)
            logits = linear(wide, self.router[...].astype(jnp.float32))
            bias = None if self.router_bias is None else self.router_bias[...]
            chosen, weights = route(logits, bias, self.experts)
            if around.routed is not None:
                around.routed(logits, chosen, self.experts)
        with jax.named_scope("experts"):
            first = around.sum_experts.index() * self.gate_up.shape[0]
            out = experts_ffn(rows, chosen - first, weights, self.gate_up[...], self.down[...])
            out = around.sum_experts(out).astype(x.dtype)
            x = out if self.post_norm is None else x + out
        if self.shared_gate_up is None or self.shared_down is None:
            return x
        with jax.named_scope("shared_expert"):
            act = linear(normed, self.shared_gate_up[...])
            act = jax.nn.silu(act[:, 0]) * act[:, 1]
            if self.shared_gate is not None:
                act = act * jax.nn.sigmoid(linear(normed, self.shared_gate[...])[:, :1])
            return project_add(act, self.shared_down[...], x, around.sum_ffn, around.kernels)

    @staticmethod
    def leaves(config: ModelConfig) -> tuple[Leaf, ...]:
        """Its weights; experts are the logical axis `experts`, columns of the shared one `ffn`."""
        experts, d = _experts(config), config.hidden_size
        e, f, shared = experts.num_experts, experts.width, experts.shared_width
        down = whole("mlp.experts.{e}.down_proj.weight", (d, f)), whole("mlp.experts.down_proj", (e, d, f))
        leaves = [
            never_float8(plain("router", (e, d), (None, None), "mlp.gate.weight")),
            _expert_gate_up(e, f, d),
            Leaf(("down",), (e, d, f), ("experts", None, None), down),
        ]
        if config.streams is None:
            leaves.insert(
                0, norm("post_norm", d, "post_attention_layernorm.weight", config.zero_centred_norms)
            )
        if experts.scoring == "sigmoid":
            bias = plain("router_bias", (e,), (None,), "mlp.gate.e_score_correction_bias")
            leaves.append(dataclasses.replace(bias, dtype=jnp.dtype("float32")))
        if shared:
            name = "mlp.shared_expert." if experts.gated_shared else "mlp.shared_experts."
            leaves.append(_gate_up("shared_gate_up", name, shared, d))
            leaves.append(plain("shared_down", (d, shared), (None, "ffn"), f"{name}down_proj.weight"))
        if experts.gated_shared:
            leaves.append(plain("shared_gate", (1, d), (None, None), "mlp.shared_expert_gate.weight"))
        return tuple(leaves)


def route(logits: jax.Array, bias: jax.Array | None, experts: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Which experts each token uses, and how much: (ids [M, per_token] int32, weights [M, per_token] fp32).

    Args:
      logits: the router's, [M, E] fp32.
      bias: e_score_correction_bias [E] fp32: it takes part in choosing, not in the weights.
      experts: with `scoring` sigmoid, groups are ranked by the sum of their two best experts, and only
        experts of the best groups can be chosen (DeepSeek-V3).
    """
    scores = jax.nn.sigmoid(logits) if experts.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias
    m, e = choice.shape
    if experts.kept_groups < experts.num_groups:
        grouped = choice.reshape(m, experts.num_groups, e // experts.num_groups)
        best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)  # M groups
        _, kept = jax.lax.top_k(best, experts.kept_groups)
        open_groups = jnp.any(kept[:, :, None] == jnp.arange(experts.num_groups), axis=1)
        choice = jnp.where(open_groups[:, :, None], grouped, -jnp.inf).reshape(m, e)
    _, chosen = jax.lax.top_k(choice, experts.per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.normalise:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return chosen, weights * experts.scale


def experts_ffn(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: Weight, down: Weight
) -> jax.Array:
    """The part of a mixture that these experts give: x [M, D] -> [M, D] fp32.

    Args:
      x: tokens.
      chosen: experts of each token, [M, J]; numbers outside 0..E - 1 are somebody else's.
      weights: of each choice, [M, J] fp32.
      gate_up: [E, 2, F, D]; down: [E, D, F].
    """
    e, _, f, d = gate_up.shape
    m, j = chosen.shape
    if m <= FEW_ROWS:
        return _all_experts(x, chosen, weights, gate_up, down)
    flat = jnp.where((chosen >= 0) & (chosen < e), chosen, e).reshape(-1)
    order = jnp.argsort(flat, stable=True)  # choices by expert, other devices' last
    counts = jnp.sum(flat[:, None] == jnp.arange(e), axis=0, dtype=jnp.int32)
    rows = x[order // j]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    rows, matrices = dense(rows, gate_up.reshape(e, 2 * f, d))
    act = jax.lax.ragged_dot_general(rows, matrices, counts, _BY_EXPERT, precision)
    act = jax.nn.silu(act[:, :f]) * act[:, f:]
    act, matrices = dense(act, down)
    out = jax.lax.ragged_dot_general(act, matrices, counts, _BY_EXPERT, precision)
    mine = (flat[order] < e)[:, None]  # rows past the last expert's are not defined
    out = jnp.where(mine, out.astype(jnp.float32), 0.0) * weights.reshape(-1)[order][:, None]
    # Back in the order of choices, so that each token's sum has one order whatever else is in the batch.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(m * j), unique_indices=True)
    return jnp.sum(out[back].reshape(m, j, d), axis=1)


def _all_experts(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, gate_up: Weight, down: Weight
) -> jax.Array:
    """As `experts_ffn`, by every expert for every token: their weights are read once, and never copied.

    A few tokens choose most experts among them, and the products cost less than reading the weights.
    """
    places = chosen[:, :, None] == jnp.arange(gate_up.shape[0])  # M J E
    shares = jnp.sum(jnp.where(places, weights[:, :, None], 0.0), axis=1)  # M E
    act = product("md,ehfd->mehf", x, gate_up)
    act = jax.nn.silu(act[:, :, 0]) * act[:, :, 1]
    out = product("mef,edf->med", act, down).astype(jnp.float32)
    # A choice of nobody weighs nothing, whatever its expert makes of a token that it never saw in training.
    return jnp.sum(jnp.where(shares[:, :, None] > 0, out * shares[:, :, None], 0.0), axis=1)


def _gate_up(path: str, prefix: str, f: int, d: int) -> Leaf:
    stored = halves((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), (f, d))
    return Leaf((path,), (2, f, d), (None, "ffn", None), (stored,))


def _expert_gate_up(e: int, f: int, d: int) -> Leaf:
    """One tensor each, or all of them in one (Qwen3.5: gate rows first)."""
    single = halves(("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"), (f, d))
    fused = whole("mlp.experts.gate_up_proj", (e, 2 * f, d))
    return Leaf(("gate_up",), (e, 2, f, d), ("experts", None, None, None), (single, fused))


def _experts(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts
