"""The kernels compile for four generations of TPUs without one: tiles can be addressed, VMEM holds them."""

import pytest

from tests.pallas_kernels.aot import compiled, show

# Spills are stores to VMEM, which a program here or there has a few of: shown, not judged.
COLUMNS = ("bundles", "spilled", "vmem", "temp", "seconds")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p", "tpu7x"])
@pytest.mark.parametrize("op", ["sparse_mla"])
def test_every_named_shape_compiles(op: str, chip: str) -> None:
    pytest.importorskip("libtpu", reason="needs jax[tpu], no TPU")
    whole = compiled("compile_for_tpu.py", op, chip)
    show(f"{op}, {chip}", whole, COLUMNS)
    assert len(whole) >= 18
    with_bundles = compiled("compile_for_tpu.py", op, chip, "--bundles")
    show(f"{op}, {chip}, from the compiler's dumps", with_bundles, COLUMNS)
    for kernel in with_bundles:
        assert kernel["bundles"] and kernel["vmem"], kernel
