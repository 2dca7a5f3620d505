"""Every quantised format against weights that were packed element by element."""

import ml_dtypes
import numpy as np
import pytest

from mtp_jax.loading.compressed import CompressedTensors
from mtp_jax.loading.fp8 import FP8Format
from mtp_jax.loading.int4 import AWQ, GPTQ
from mtp_jax.loading.nvfp4 import ModelOpt, Quark
from mtp_jax.loading.quantised import Format, LogicalTensors
from tests.loading import packers
from tests.loading.packers import E4M3, E5M2, E8M0, Packed

X = "model.layers.0.mlp.up_proj."
W = X + "weight"


def check(tmp_path, form: Format, packed: Packed) -> LogicalTensors:
    """The weight comes out exactly, with nothing beside it."""
    tensors = LogicalTensors(packers.stored(tmp_path, packed.tensors), form)
    assert tensors.names() == {W}
    value = tensors.read(W)
    assert value.dtype == tensors.dtype(W) == ml_dtypes.bfloat16
    assert value.shape == tensors.shape(W) == packed.weight.shape and value.nbytes == tensors.nbytes(W)
    np.testing.assert_array_equal(value.astype(np.float32), packed.weight.astype(np.float32))
    assert np.unique(value.astype(np.float32)).size > 4
    return tensors


@pytest.mark.parametrize("scale_kind", [np.float32, packers.BF16, E8M0, np.uint8])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((130, 200), (128, 128)), ((128, 256), (128, 128)), ((33, 50), (16, 24)), ((5, 7), (128, 128))],
)
def test_fp8_blocks(tmp_path, shape, block, scale_kind):
    tensors = check(tmp_path, FP8Format(block), packers.fp8(W, shape, block, scale_kind=scale_kind))
    assert list(tensors.stored_bytes()[1]) == ["fp8 blocks"]


@pytest.mark.parametrize("form", [FP8Format(), FP8Format((128, 128)), CompressedTensors(), ModelOpt()])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("block", "scale_shape"),
    [((20, 36), ()), ((20, 36), (1,)), ((20, 36), (1, 1)), ((1, 36), (20,)), ((1, 36), (20, 1))],
)
def test_fp8_with_a_scale_for_the_tensor_or_a_row(tmp_path, form, kind, block, scale_shape):
    packed = packers.fp8(W, (20, 36), block, end="_scale", kind=kind, scale_shape=scale_shape)
    unused = {
        X + "input_scale": np.ones(1, np.float32),
        "model.layers.0.self_attn.k_scale": np.ones((), np.float32),
    }
    check(tmp_path, form, Packed(packed.tensors | unused, packed.weight))


def test_fp8_experts_in_one_tensor(tmp_path):
    parts = [packers.fp8(W, (20, 30), (16, 16), seed=seed) for seed in range(3)]
    tensors = {name: np.stack([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    check(tmp_path, FP8Format((16, 16)), Packed(tensors, np.stack([part.weight for part in parts])))


def test_pieces_of_a_large_tensor_join(tmp_path):
    """More rows than are dequantised at once, in pieces that do not end where blocks do."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 126, (300, 2900)).astype(np.uint8).view(E4M3)
    scales = rng.uniform(0.001, 0.1, (3, 23)).astype(np.float32)
    of_element = np.kron(scales, np.ones((128, 128), np.float32))[:300, :2900]
    weight = packers.result(codes.astype(np.float32) * of_element)
    check(tmp_path, FP8Format((128, 128)), Packed({W: codes, W + "_scale_inv": scales}, weight))


@pytest.mark.parametrize(("columns", "group"), [(64, 16), (48, 48), (40, 16)])
def test_awq(tmp_path, columns, group):
    check(tmp_path, AWQ(None if group == columns else group), packers.awq(X, 24, columns, group))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    ("columns", "group", "order"), [(64, 16, ""), (64, 16, "plain"), (40, 16, "act"), (48, 48, "")]
)
def test_gptq(tmp_path, bits, offset, columns, group, order):
    form = GPTQ(None if group == columns else group, bits, offset)
    check(tmp_path, form, packers.gptq(X, 24, columns, group, bits=bits, offset=offset, order=order))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("columns", "group", "shuffled"), [(64, 16, False), (45, 16, True), (50, 50, False)])
def test_compressed_integers(tmp_path, bits, symmetric, columns, group, shuffled):
    packed = packers.packed_integers(W, 21, columns, group, bits=bits, symmetric=symmetric, shuffled=shuffled)
    check(tmp_path, CompressedTensors((4, 8), None if group == columns else group), packed)


def test_compressed_blocks_of_float8(tmp_path):
    form = CompressedTensors((), None, FP8Format((16, 16)))
    check(tmp_path, form, packers.fp8(W, (20, 40), (16, 16), end="_scale"))


def test_nvfp4(tmp_path):
    packed = packers.nvfp4(W, 6, 48)
    check(
        tmp_path,
        ModelOpt(),
        Packed(packed.tensors | {X + "input_scale": np.ones((), np.float32)}, packed.weight),
    )
    packed = packers.nvfp4(W, 6, 48, compressed=True)
    unused = {X + "input_global_scale": np.ones(1, np.float32)}
    check(tmp_path, CompressedTensors(), Packed(packed.tensors | unused, packed.weight))


def test_mxfp4(tmp_path):
    check(tmp_path, Quark(), packers.mxfp4(W, 6, 96))
    check(tmp_path, CompressedTensors(mxfp4=True), packers.mxfp4(W, 6, 96, compressed=True))


def test_one_checkpoint_may_mix(tmp_path):
    """NVFP4 experts, float8 attention in blocks, and a plain matrix that no list excludes."""
    up, down = packers.nvfp4(W, 6, 48), packers.fp8("q.weight", (130, 20), (128, 128))
    plain = {"mtp.fc.weight": np.ones((4, 8), packers.BF16), "norm.weight": np.ones(4, np.float32)}
    tensors = LogicalTensors(packers.stored(tmp_path, up.tensors | down.tensors | plain), ModelOpt())
    assert tensors.names() == {W, "q.weight", *plain}
    np.testing.assert_array_equal(tensors.read("q.weight"), down.weight)
    np.testing.assert_array_equal(tensors.read("mtp.fc.weight"), plain["mtp.fc.weight"])
    assert tensors.dtype("norm.weight") == np.float32
    plain_bytes, packed_bytes = tensors.stored_bytes()
    assert plain_bytes == {"bfloat16": 64, "float32": 16}
    assert packed_bytes == {"fp8 blocks": 130 * 20 + 2 * 4, "NVFP4": 6 * 24 + 6 * 3 + 4}
