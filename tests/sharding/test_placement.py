"""The mesh and the placement table."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from sharding.mesh import AXES, make_mesh
from sharding.placement import LOGICAL_AXES, make_placement


def test_mesh_axes() -> None:
    mesh = make_mesh(4, 1, 2)
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"stage": 4, "data": 1, "tensor": 2}
    assert list(mesh.devices.flat) == jax.devices()[:8]


def test_mesh_needs_devices() -> None:
    with pytest.raises(ValueError, match=r"\(3 x 1 x 4 = 12\) up to 8, the devices of this process"):
        make_mesh(3, 1, 4)


def test_specs() -> None:
    placement = make_placement(make_mesh(2, 1, 2), {})
    assert placement.spec("layer_stage", "kv_heads", None) == P("stage", "tensor", None)
    assert placement.spec("vocab", None) == P(("stage", "tensor"), None)
    assert placement.axis_size("vocab") == 4
    assert placement.axis_size("kv_heads") == 2


def test_an_axis_that_does_not_divide_is_replicated() -> None:
    placement = make_placement(make_mesh(4), {"mtp_kv_heads": 2, "mtp_ffn": 48})
    assert placement.replicated == {"mtp_kv_heads"}
    assert placement.spec("mtp_kv_heads", None) == P(None, None)
    assert placement.axis_size("mtp_kv_heads") == 1
    assert placement.spec("mtp_ffn") == P(("stage", "tensor"))


def test_a_mesh_axis_is_used_once() -> None:
    placement = make_placement(make_mesh(2), {})
    with pytest.raises(ValueError, match="use a mesh axis twice"):
        placement.spec("layer_stage", "vocab")
    with pytest.raises(ValueError, match="use a mesh axis twice"):
        placement.spec("kv_heads", "ffn")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError):
        make_placement(make_mesh(1), {}).spec("rows")


def test_the_table_names_mesh_axes_only() -> None:
    for axes in LOGICAL_AXES.values():
        assert set((axes,) if isinstance(axes, str) else axes or ()) <= set(AXES)
