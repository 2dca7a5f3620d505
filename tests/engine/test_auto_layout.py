"""`auto` as a part of the mesh: what is chosen, among what is legal, and what happens where nothing is."""

from collections.abc import Mapping

import pytest

from mtp_jax.config import ModelConfig
from mtp_jax.engine.auto_layout import Devices, Merit, NothingFitsError, fill_layout
from mtp_jax.engine.build import draw_blueprint
from mtp_jax.engine.options import EngineOptions
from mtp_jax.errors import InvalidValueError
from tests.conftest import NUM_DEVICES
from tests.parity.rig import TINY, RandomSource

ALL = {"stages": "auto", "tensor": "auto", "data": "auto"}
LAYERS = 12


def judge(needs: int, whole_from: int = 64, room: int = 0) -> object:
    """Fits from `needs` devices a replica; beyond, each adds a request's room; wide ones leave axes whole."""

    def one(layout: Mapping[str, int]) -> Merit | None:
        devices = layout["stages"] * layout["tensor"]
        if devices < needs:
            return None
        found = layout["data"] * (1 + devices - needs)
        return Merit(max(0, room - found), int(layout["tensor"] >= whole_from))

    return one


@pytest.mark.parametrize(
    ("given", "devices", "how", "expected"),
    [
        (ALL, Devices(8), judge(1), (1, 1, 8)),  # (stages, tensor, data)
        (ALL, Devices(8), judge(2), (1, 2, 4)),
        (ALL, Devices(16, a_host=4), judge(8), (2, 4, 2)),  # shards do not leave a host
        (ALL, Devices(8), judge(4, whole_from=4), (2, 2, 2)),  # heads that four shards do not divide
        (ALL, Devices(8), judge(2, room=6), (1, 4, 2)),  # 4 x 1 requests, 2 x 3
        (ALL, Devices(8), judge(2, room=100), (1, 8, 1)),  # never enough: the most there is
        (ALL, Devices(7), judge(1), (1, 1, 7)),
        (ALL | {"data": 2}, Devices(7), judge(1), (1, 3, 2)),  # one is left over
        (ALL | {"stages": 4}, Devices(16), judge(1), (4, 1, 4)),
        ({"stages": "auto"}, Devices(8), judge(1), (8, 1, 1)),
        ({"stages": "auto"}, Devices(32), judge(1), (LAYERS, 1, 1)),  # no more stages than layers
        ({"data": "auto", "tensor": 2}, Devices(8), judge(1), (1, 2, 4)),
    ],
)
def test_the_rule(given: dict, devices: Devices, how, expected: tuple[int, int, int]) -> None:
    found = fill_layout(given, devices, LAYERS, how)
    assert (found["stages"], found["tensor"], found["data"]) == expected


def test_nothing_fits() -> None:
    with pytest.raises(NothingFitsError, match="--tensor: got 'auto'; expected a layout of up to 8 devices"):
        fill_layout({"tensor": "auto", "stages": 2}, Devices(8), LAYERS, judge(9))


def mesh_of(model: ModelConfig, **overrides: int | str | tuple[int, ...]) -> tuple[int, int, int]:
    options = EngineOptions(overrides={"max_model_len": 64, "num_pages": 64, **overrides})
    config = draw_blueprint(options, RandomSource(model)).config
    return config.stages, config.tensor, config.data


def test_on_the_devices_of_this_process() -> None:
    """Two KV heads are not divided by eight shards. What else is asked for is kept to."""
    assert mesh_of(TINY, **ALL) == (1, 1, NUM_DEVICES)
    assert mesh_of(TINY, tensor="auto", max_num_seqs=6, data="auto") == (1, 4, 2)  # 6 = 2 x 3 slots
    assert mesh_of(TINY, stages="auto", tensor="auto") == (4, 2, 1)
    layers = (3, TINY.num_hidden_layers - 3)
    assert mesh_of(TINY, stages="auto", stage_layers=layers, tensor=2) == (2, 2, 1)


def test_a_mesh_that_is_too_large_is_still_refused() -> None:
    with pytest.raises(InvalidValueError):
        mesh_of(TINY, tensor="auto", stages=NUM_DEVICES + 1)
