"""Where a module starts, and the vocabulary that it drafts from."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.errors import InvalidValueError
from mtp_jax.models.leaves import Leaf
from mtp_jax.models.registry import layer_kinds, mtp_kind, mtp_table
from mtp_jax.train.trunk import Packed, Target, residual_stream
from mtp_jax.train.unroll import Params

Init = Literal["last-layer", "random"]
INITS: tuple[Init, ...] = ("last-layer", "random")
EMBEDDING_NOISE = (
    0.2  # root mean square of what the embedding adds to a stream of 1: tokens are heard at once
)
# A delta net's heads begin with decays e^(-a s) a row, these being the ranges of a and s (Mamba-2's, which
# gated delta nets took over: arXiv:2412.06464).
_DECAYS, _STEPS = (1.0, 16.0), (1e-3, 1e-1)
_LEAST_NORM = 0.05  # a final norm's smaller weights are not undone


def initial_params(
    config: ModelConfig, target: Target, init: Init, seed: int, rows: Packed | None = None
) -> Params:
    """fp32 leaves of a new MTP module.

    `last-layer`: the hidden state, with the final norm's weights undone, plus a little of the token's
    embedding goes through a copy of the target's last layer and its final norm. The layer was made for the
    residual stream's size, which is measured on `rows`; here the stream has size 1, where the optimiser's
    steps fit, and the layer's outputs are scaled down instead. `random` is an ordinary start.
    """
    rng = np.random.default_rng(seed)
    params = random_params(config, rng)
    if init == "last-layer":
        assert rows is not None
        last = layer_kinds(config)[-1]
        if mtp_kind(config) != last:
            legal = f"random, where the last layer has {last.describe()} and the module's has not"
            raise InvalidValueError("--init", init, legal)
        d = config.hidden_size
        size = stream_size(config, target, rows)
        for name, stacked in target.layers[-1].items():
            scale = size if name.endswith((".o", ".down", ".shared_down")) else 1.0
            params[f"layer.{name}"] = stacked[-1].astype(jnp.float32) / jnp.float32(scale)
        norm = np.asarray(target.final_norm).astype(np.float32)
        params["final_norm"] = jnp.asarray(norm)
        safe = np.where(np.abs(norm) < _LEAST_NORM, np.copysign(_LEAST_NORM, norm), norm)
        # A hidden state is a vector of size 1 times `norm`, and the module divides by the size of that.
        params["hidden_norm"] = jnp.asarray(np.sqrt(np.mean(norm**2)) / safe)
        noise = rng.standard_normal((d, d), dtype=np.float32) * np.float32(EMBEDDING_NOISE * d**-0.5)
        params["input_proj"] = jnp.asarray(np.concatenate([np.eye(d, dtype=np.float32), noise], axis=1))
    return params


def random_params(config: ModelConfig, rng: np.random.Generator) -> Params:
    """fp32 leaves of an MTP module that knows nothing."""
    return {leaf.name: jnp.asarray(random_leaf(leaf, rng)) for leaf in mtp_table(config)}


def stream_size(config: ModelConfig, target: Target, rows: Packed) -> float:
    """Median over `rows` [B, S] of the root mean square of what enters the target's last layer."""
    *earlier, last = target.layers
    but_last = dataclasses.replace(target, layers=(*earlier, {name: x[:-1] for name, x in last.items()}))
    stream = jax.jit(lambda target: residual_stream(config, target, rows, "xla"))(but_last)
    sizes = np.sqrt(np.mean(np.square(np.asarray(stream, np.float32)), axis=-1))
    return float(np.median(sizes[np.asarray(rows.segments) > 0]))


def random_leaf(leaf: Leaf, rng: np.random.Generator) -> np.ndarray:
    """An ordinary fp32 start: outputs of size 1 from inputs of size 1, norms of 1, no biases."""
    name = leaf.path[-1]
    if name == "a_log":
        return np.log(rng.uniform(*_DECAYS, leaf.shape)).astype(np.float32)
    if name == "dt_bias":
        least, most = _STEPS
        step = np.exp(rng.uniform(np.log(least), np.log(most), leaf.shape))
        return (step + np.log(-np.expm1(-step))).astype(np.float32)  # softplus of it is the step
    if "bias" in name:
        return np.zeros(leaf.shape, np.float32)
    if "norm" in name:
        return np.ones(leaf.shape, np.float32)
    # `o` takes [G, Q, H] inputs; all others take the last axis.
    inputs = np.prod(leaf.shape[1:]) if name == "o" else leaf.shape[-1]
    return rng.standard_normal(leaf.shape, dtype=np.float32) * np.float32(inputs**-0.5)


def draft_vocabulary(counts: np.ndarray, size: int) -> np.ndarray | None:
    """Ids of the `size` most frequent tokens, ascending int32; None for all: size 0, or no smaller than that.

    Args:
      counts: how often the target wrote each token, [V].
    """
    if not 0 < size < counts.shape[0]:
        return None
    frequent = np.argsort(-counts.astype(np.int64), kind="stable")[:size]
    return np.sort(frequent).astype(np.int32)
