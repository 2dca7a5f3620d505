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
# Leaf -> which of its axes the matrix takes and gives, from the end: what stacks layers, and the two of
# gate and up, are matrices of their own.
_AXES = {
    "qkv": MuonDimensionNumbers(-1, (-4, -3, -2)),  # G Q+2 H <- D
    "o": MuonDimensionNumbers((-3, -2, -1), -4),  # D <- G Q H
    "gate_up": MuonDimensionNumbers(-1, -2),  # 2 | F <- D
    "down": MuonDimensionNumbers(-1, -2),  # D <- F
    "input_proj": MuonDimensionNumbers(-1, -2),  # D <- 2 D
}


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
    """True for matrices: norms and biases are not pulled to zero."""

    def is_matrix(path: tuple, _: jax.Array) -> bool:
        name = _name(path)
        return "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def matrix_axes(params: optax.Params) -> optax.Params:
    """Axes of the leaves that Muon updates; None for norms, biases and tables of the vocabulary."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _AXES.get(_name(path)), params)
