"""GGUF files: every supported type read back exactly, and every file we must refuse."""

import struct
from concurrent.futures import ThreadPoolExecutor

import gguf
import ml_dtypes
import numpy as np
import pytest

from mtp_jax.config import RopeScaling
from mtp_jax.errors import CheckpointError
from mtp_jax.loading import GGUFFile, default_model_path, resolve_model
from mtp_jax.loading.gguf_blocks import OTHER_TYPE_NAMES, TYPE_NAMES, dequantize
from mtp_jax.loading.gguf_file import hf_name, llama3_divisors, split_rotary_halves
from tests.loading.tiny_gguf import HEAD_DIM, TinyGGUF, interleaved_rows

Kind = gguf.GGMLQuantizationType
KINDS = {
    Kind.F32: np.float32,
    Kind.F16: np.float16,
    Kind.BF16: ml_dtypes.bfloat16,
    Kind.Q8_0: np.float32,
    Kind.Q4_0: np.float32,
    Kind.Q4_1: np.float32,
}


@pytest.fixture(scope="module")
def default_model():
    return resolve_model(None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False)])
def test_every_type_reads_back_exactly(tmp_path, kind, architecture, tied):
    tiny = TinyGGUF(architecture, kind, tied)
    source = GGUFFile(tiny.write(tmp_path / "tiny.gguf"))
    assert source.names() == set(tiny.expected)
    for name, expected in tiny.expected.items():
        got = source.read(name)
        assert got.dtype == source.dtype(name) == (np.float32 if expected.ndim == 1 else KINDS[kind])
        assert got.shape == source.shape(name) and got.nbytes == source.nbytes(name)
        np.testing.assert_array_equal(got.astype(np.float32), expected, err_msg=name)


def test_config_comes_from_the_metadata(tmp_path):
    tiny = TinyGGUF("llama", tied=False, metadata={"tokenizer.ggml.eot_token_id": 9})
    config = GGUFFile(tiny.write(tmp_path / "tiny.gguf")).config
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("llama", 40, 64)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert (config.head_dim, config.intermediate_size, config.max_position_embeddings) == (16, 96, 128)
    assert (config.rope_theta, config.rms_norm_eps, config.rope_scaling) == (50000.0, 1e-5, None)
    assert not config.tie_word_embeddings and not config.attention_bias
    assert config.eos_token_ids == (2, 9)


def test_qwen2_has_biases_and_tied_models_no_head(tmp_path):
    source = GGUFFile(TinyGGUF("qwen2").write(tmp_path / "tiny.gguf"))
    assert source.config.attention_bias and source.config.tie_word_embeddings
    assert "lm_head.weight" not in source.names()


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_rope_scaling(tmp_path, metadata):
    """Files of old converters do not name the type, or have one key of another name."""
    config = GGUFFile(TinyGGUF(metadata=metadata).write(tmp_path / "tiny.gguf")).config
    assert config.rope_scaling == RopeScaling("linear", 4.0)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path):
    tiny = TinyGGUF()
    scaling = RopeScaling("llama3", 8.0)
    divisors = llama3_divisors(scaling, 50000.0, HEAD_DIM)
    assert divisors[0] == 1 and divisors[-1] == pytest.approx(8)
    tiny.tensors["rope_freqs.weight"] = divisors.astype(np.float32)
    source = GGUFFile(tiny.write(tmp_path / "tiny.gguf"))
    assert source.config.rope_scaling == scaling and source.names() == set(tiny.expected)


def test_other_rope_divisors_are_refused(tmp_path):
    tiny = TinyGGUF()
    tiny.tensors["rope_freqs.weight"] = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    path = tiny.write(tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*Llama 3's scaling"):
        GGUFFile(path)


def test_halves_are_split_back():
    rows = np.arange(3 * HEAD_DIM)[:, None] * np.ones((1, 5))
    np.testing.assert_array_equal(split_rotary_halves(rows[interleaved_rows(3)], 3), rows)
    np.testing.assert_array_equal(split_rotary_halves(np.array([0, 2, 1, 3]), 1), [0, 1, 2, 3])


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_dequantising_equals_the_gguf_package_for_any_bytes(kind):
    """Random bytes too: extreme scales, negative zero and so on, over several chunks."""
    block = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 256, (300, 30 * block), np.uint8)
    raw.reshape(-1, block)[:, [1, 3]] &= 0x7B  # no infinite scales: their NaNs have no value to compare
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantize(raw, kind.name), gguf.quants.dequantize(raw, kind))


def test_reads_are_safe_from_several_threads(tmp_path):
    tiny = TinyGGUF("llama", Kind.Q4_1)
    source = GGUFFile(tiny.write(tmp_path / "tiny.gguf"))
    names = sorted(source.names()) * 20
    with ThreadPoolExecutor(8) as pool:
        for name, got in zip(names, pool.map(source.read, names), strict=True):
            np.testing.assert_array_equal(got, tiny.expected[name])


def test_a_type_we_cannot_read_is_named_with_its_tensor(tmp_path):
    tiny = TinyGGUF()
    writer_bytes = TinyGGUF("llama", Kind.Q8_0).write(tmp_path / "tiny.gguf").read_bytes()
    # Q8_0 is id 8; the table entry ends name, dims, type, offset. Turn token_embd's type into Q6_K, 14.
    at = writer_bytes.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    assert writer_bytes[at] == 8 and "token_embd.weight" in tiny.tensors
    (tmp_path / "tiny.gguf").write_bytes(writer_bytes[:at] + bytes([14]) + writer_bytes[at + 1 :])
    with pytest.raises(CheckpointError, match=r"tensor token_embd\.weight: got 'Q6_K'.*Q4_1"):
        GGUFFile(tmp_path / "tiny.gguf")


def test_type_names_are_the_format_s():
    assert {kind.value: kind.name for kind in Kind} == TYPE_NAMES | OTHER_TYPE_NAMES


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.alignment": 0}, r"general\.alignment: got 0"),
        ({"general.alignment": "x"}, r"general\.alignment: got 'x'"),
        ({"llama.block_count": 2**31}, r"block_count: got 2147483648.*10000"),
        ({"llama.block_count": 0}, r"block_count: got 0"),
        ({"llama.attention.head_count": 0}, r"head_count: got 0"),
        ({"llama.embedding_length": 64.5}, r"embedding_length: got 64\.5.*integer"),
        ({"llama.rope.freq_base": float("nan")}, r"freq_base: got nan"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, r"epsilon: got 0\.0"),
        ({"tokenizer.ggml.eos_token_id": 40}, r"eos_token_id: got 40.*0 to 39"),
        ({"tokenizer.ggml.eos_token_id": "x"}, r"eos_token_id: got 'x'"),
        ({"general.architecture": "gemma"}, r"general\.architecture: got 'gemma'.*llama, qwen2"),
        ({"llama.rope.scaling.type": "yarn"}, r"scaling\.type: got 'yarn'.*linear"),
        ({"llama.rope.dimension_count": 8}, r"dimension_count: got 8.*16"),
        ({"llama.attention.head_count_kv": 3}, r"head_count_kv: got 3.*divisor"),
        ({"llama.block_count": 3}, r"9 missing: model\.layers\.2\.input_layernorm\.weight \[64\], "),
        ({"llama.block_count": 1}, r"9 unexpected: model\.layers\.1\.input_layernorm\.weight, "),
        (
            {"llama.feed_forward_length": 128},
            r"6 of another shape: .*mlp\.gate_proj\.weight \[96, 64\] instead of \[128, 64\]",
        ),
        ({"llama.context_length": "many"}, r"context_length: got 'many'.*integer"),
    ],
)
def test_metadata_that_cannot_be_served(tmp_path, metadata, message):
    tiny = TinyGGUF(metadata=metadata)
    if "general.architecture" in metadata:
        tiny.architecture = tiny.metadata.pop("general.architecture")
    path = tiny.write(tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_missing_and_surplus_tensors(tmp_path):
    tiny = TinyGGUF()
    del tiny.tensors["blk.1.ffn_up.weight"]
    path = tiny.write(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*no such tensor"):
        GGUFFile(path)
    tiny = TinyGGUF()
    tiny.tensors["blk.0.attn_output.bias"] = np.zeros(64, np.float32)
    path = tiny.write(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.o_proj\.bias.*does not have"):
        GGUFFile(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 200, -1])
def test_files_cut_short(tmp_path, keep):
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf.*expected"):
        GGUFFile(path)


def test_other_files_and_versions(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="begins with b'GGUF'"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + bytes([0, 0, 0, 3]) + bytes(100))  # big-endian
    with pytest.raises(CheckpointError, match="2 or 3, little-endian"):
        GGUFFile(path)


def test_a_path_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"got 'Is a directory'.*a readable GGUF file"):
        GGUFFile(tmp_path)  # root may read every file, but no directory as one


def header_of(*tensor: int) -> bytes:
    """A file with one tensor `t` of the given dimensions, F32, and no metadata."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t"
    return head + struct.pack(f"<I{len(tensor)}Q", len(tensor), *tensor) + struct.pack("<IQ", 0, 0)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (2**32, 2**32), (2**63, 2)])
def test_shapes_that_no_file_holds(tmp_path, shape):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(header_of(*shape) + bytes(64))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: (t: .*without zeros|file size)"):
        GGUFFile(path)


def test_lists_in_lists_without_end(tmp_path):
    path = tmp_path / "tiny.gguf"
    nested = struct.pack("<IQ", 9, 1) * 5000  # each level: a list of one list
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + nested)
    with pytest.raises(CheckpointError, match="a header that breaks off"):
        GGUFFile(path)


def test_reading_an_unknown_name(tmp_path):
    source = GGUFFile(TinyGGUF().write(tmp_path / "tiny.gguf"))
    for ask in (source.read, source.nbytes, source.dtype, source.shape):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight.*no such tensor"):
            ask("lm_head.weight")


def test_names():
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.11.ffn_norm.weight") == "model.layers.11.post_attention_layernorm.weight"
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


def test_the_default_model(default_model):
    config = default_model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,)
    assert default_model.read("model.embed_tokens.weight").shape == (49152, 576)
    assert "135M" in default_model.describe() and "Q4_1 x 210" in default_model.describe()
    assert default_model_path().name in default_model.describe()
