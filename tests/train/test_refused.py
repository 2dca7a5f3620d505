"""Models whose layers the trainer does not have are refused before anything is read."""

from pathlib import Path

import pytest

from mtp_jax.errors import UnsupportedHereError
from mtp_jax.loading.hf_config import config_from_directory
from mtp_jax.train.trunk import check_trainable

GOLDEN = Path(__file__).parents[1] / "golden"


def test_several_residual_streams() -> None:
    with pytest.raises(UnsupportedHereError, match="several residual streams is not supported yet"):
        check_trainable(config_from_directory(GOLDEN / "tiny_qwen4_exp"))
