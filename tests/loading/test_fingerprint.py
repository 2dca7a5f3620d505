"""A target's fingerprint: the same for the same weights however stored, another for any other model."""

import dataclasses

import numpy as np
import pytest

from mtp_jax.config import ModelConfig, RopeScaling
from mtp_jax.loading import resolve_model
from mtp_jax.loading.fingerprint import fingerprint, target_fingerprint
from tests.house.source import ROOT

GOLDEN = ROOT / "tests" / "golden"
CONFIG = ModelConfig(
    "llama", 64, 8, 2, 2, 1, 4, 16, rope_scaling=RopeScaling("linear", 2.0), rms_norm_eps=1e-5
)
NORM = np.linspace(0.5, 2, 8, dtype=np.float32)


def test_storage_does_not_matter() -> None:
    """GGUF keeps 1e-5 as float32; a context limit, stop tokens and an MTP module are no part of a target."""
    other = dataclasses.replace(
        CONFIG,
        rms_norm_eps=float(np.float32(1e-5)),
        max_position_embeddings=99,
        eos_token_ids=(1,),
        num_nextn_predict_layers=1,
    )
    assert other.rms_norm_eps != CONFIG.rms_norm_eps
    assert fingerprint(other, NORM) == fingerprint(CONFIG, NORM)
    assert fingerprint(CONFIG, NORM.astype(np.float16).astype(np.float64)) == fingerprint(
        CONFIG, NORM.astype(np.float16)
    )


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 3}, {"rope_theta": 5e5}, {"rope_scaling": RopeScaling("linear", 4.0)}]
)
def test_another_configuration_is_another_target(change: dict[str, object]) -> None:
    changed = dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]
    assert fingerprint(changed, NORM) != fingerprint(CONFIG, NORM)


def test_another_norm_is_another_target() -> None:
    other = NORM.copy()
    other[3] = np.nextafter(other[3], 9, dtype=np.float32)
    assert fingerprint(CONFIG, other) != fingerprint(CONFIG, NORM)


def test_of_a_checkpoint() -> None:
    """The digits are in heads that people have: they must not change."""
    names = ("tiny_mimo", "tiny_qwen2", "tiny_qwen4_exp")  # the last one has a mixer for a final norm
    found = [target_fingerprint(resolve_model(GOLDEN / name)) for name in names]
    assert found == ["88004658bea9d610", "53cb4875fa2ef11c", "14c24d7008be82a6"]
