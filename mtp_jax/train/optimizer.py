"""How a gradient becomes an update: AdamW, or Muon for the matrices and AdamW for the rest."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from mtp_jax.train.arguments import Optimizer

_B1, _B2 = 0.9, 0.95
# Root mean square of a Muon update at rate 1, whatever the matrix's shape: about that of AdamW's updates,
# so that rates and weight decay mean the same for both (arXiv:2502.16982).
_RMS = 0.2
# Leaves that are matrices for Muon. They take their last axis (`o`: all but the first) and give all others,
# or only the next: what stacks layers and experts, and the two of gate and up, are matrices of their own.
# Routers, indexers' head weights and what is no matrix are AdamW's.
_WHOLE = ("qkv", "gate", "q_down", "q_up", "kv_down", "k_up", "v_up", "z", "q", "k")
_STACKED = ("gate_up", "down", "shared_gate_up", "shared_down", "input_proj")
_NOT_DECAYED = ("norm", "bias", "a_log")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The optimiser's settings. Rates: linear warm-up to the peak, then half a cosine to `floor` of it."""

    steps: int
    peak: float  # AdamW's
    warmup: int
    weight_decay: float
    clip_norm: float
    optimizer: Optimizer = "adamw"
    muon_peak: float = 0.0
    ema: float = 0.0  # share of the moving average that an update keeps; 0: none is kept
    floor: float = 0.01

    def rate(self, peak: float | None = None) -> optax.Schedule:
        """Update number -> rate; AdamW's where no other peak is given."""
        peak = self.peak if peak is None else peak
        warmup = min(self.warmup, max(self.steps // 10, 1))
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, warmup, max(self.steps, warmup + 1), peak * self.floor
        )

    def averaged(self, step: jax.Array) -> jax.Array:
        """Share of the moving average that update `step` keeps: less at first, when it soon is old."""
        return jnp.minimum(self.ema, (1.0 + step) / (10.0 + step))

    def transformation(self) -> optax.GradientTransformation:
        """The optimiser itself."""
        clip = optax.clip_by_global_norm(self.clip_norm)
        if self.optimizer == "adamw":
            decay = self.weight_decay
            return optax.chain(clip, optax.adamw(self.rate(), _B1, _B2, weight_decay=decay, mask=decayed))
        by_muon = muon(
            self.rate(self.muon_peak),
            weight_decay=self.weight_decay,
            adam_b1=_B1,
            adam_b2=_B2,
            adam_learning_rate=self.rate(),
            muon_weight_dimension_numbers=matrix_axes,
            consistent_rms=_RMS,
        )
        return optax.chain(clip, by_muon)


def _name(path: tuple) -> str:
    """`.mtp['layer.qkv']` -> `qkv`."""
    return re.findall(r"\w+", jax.tree_util.keystr(path))[-1]


def decayed(params: optax.Params) -> optax.Params:
    """True for matrices: norms, biases and decays are not pulled to zero."""

    def is_matrix(path: tuple, _: jax.Array) -> bool:
        return not any(part in _name(path) for part in _NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def matrix_axes(params: optax.Params) -> optax.Params:
    """Axes of the leaves that Muon updates; None for norms, biases and tables of the vocabulary."""

    def axes(path: tuple, leaf: jax.Array) -> MuonDimensionNumbers | None:
        name = _name(path)
        own = leaf.ndim - (".layers" in jax.tree_util.keystr(path))  # runs of a target's layers are stacked
        if name == "o":
            return MuonDimensionNumbers(tuple(range(1 - own, 0)), -own)
        if name in _WHOLE:
            return MuonDimensionNumbers(-1, tuple(range(-own, -1)))
        return MuonDimensionNumbers(-1, -2) if name in _STACKED else None

    return jax.tree_util.tree_map_with_path(axes, params)
