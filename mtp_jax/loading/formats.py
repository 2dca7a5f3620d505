"""Which format a checkpoint's weights are in: `quantization_config` of its config.json."""

from collections.abc import Mapping
from pathlib import Path

from mtp_jax.errors import CheckpointError
from mtp_jax.loading.compressed import CompressedTensors
from mtp_jax.loading.fp8 import FP8Format
from mtp_jax.loading.hf_fields import Fields, read_json
from mtp_jax.loading.int4 import AWQ, GPTQ
from mtp_jax.loading.names import canonical_name
from mtp_jax.loading.nvfp4 import ModelOpt, Quark
from mtp_jax.loading.quantised import Format, Shape

METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "modelopt", "modelopt_fp4", "quark")
_KEY, _OLD_KEY = "quantization_config", "compression_config"
_MODELOPT_FILE = "hf_quant_config.json"  # what modelopt writes where config.json says nothing
_MXFP4 = "mxfp4-pack-quantized"
_PACKINGS = (
    "pack-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    _MXFP4,
    "mixed-precision",
)
_ALGORITHMS = ("NVFP4", "FP8", "FP8_PB_WO", "MIXED_PRECISION")


def format_of(directory: Path) -> Format | None:
    """The format of a directory's weights; None where they are plain.

    Lists of modules that are not quantised are not needed: the stored tensors show it, and published lists
    are at times wrong.

    Raises:
      CheckpointError: names `quant_method`, or a field of it with a value that we cannot read.
    """
    fields = _description(directory)
    if fields is None:
        return None
    match fields.values.get("quant_method"):
        case "fp8":
            return _fp8(fields)
        case "awq":
            return _awq(fields)
        case "gptq":
            return _gptq(fields)
        case "compressed-tensors":
            return _compressed(fields)
        case "modelopt" | "modelopt_fp4":
            fields.must_be("quant_algo", (*_ALGORITHMS, None))
            return ModelOpt()
        case "quark":
            return _quark(fields)
    raise fields.fail("quant_method", "one of " + ", ".join(METHODS))


def planned_blocks(directory: Path, tensors: Mapping[str, Shape]) -> dict[str, int]:
    """Columns that share a scale, of the tensors that config.json says are float8: for plans without weights.

    Args:
      directory: with config.json.
      tensors: of the model, by name.
    """
    fields = _description(directory)
    if fields is None or fields.values.get("quant_method") != "fp8":
        return {}
    block = _block(fields, "weight_block_size")
    listed = fields.values.get("modules_to_not_convert") or fields.values.get("ignored_layers")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    excluded = [canonical_name(name) or name for name in names]
    return {
        name: shape[-1] if block is None else block[1]
        for name, shape in tensors.items()
        if len(shape) > 1 and not any(f".{module}." in f".{name}." for module in excluded)
    }


def _description(directory: Path) -> Fields | None:
    config = read_json(directory / "config.json")
    inner = config.get("text_config")
    for where, values in (("config.json", config), ("config.json: text_config", inner)):
        for key in (_KEY, _OLD_KEY):
            if isinstance(values, Mapping) and values.get(key):
                return Fields(where, values).mapping(key)
    path = directory / _MODELOPT_FILE
    if not path.is_file():
        return None
    fields = Fields(path.name, read_json(path)).mapping("quantization")
    if fields.values.get("quant_algo") is None:  # a cache that is quantised, and nothing else
        return None
    return Fields(fields.where, {"quant_method": "modelopt", **fields.values})


def _fp8(fields: Fields) -> FP8Format:
    return FP8Format(_block(fields, "weight_block_size"))


def _quark(fields: Fields) -> Quark:
    weight = fields.mapping("global_quant_config").mapping("weight")
    weight.must_be("dtype", ("fp4", "fp8_e4m3", None))
    if weight.values.get("dtype") == "fp4":
        weight.must_be("group_size", (32,))
        weight.must_be("scale_format", ("e8m0",))
    return Quark()


def _block(fields: Fields, key: str) -> tuple[int, int] | None:
    value = fields.values.get(key)
    if value is None:
        return None
    sizes = [size for size in value if type(size) is int and size > 0] if isinstance(value, list) else []
    if not isinstance(value, list) or len(sizes) != len(value) or len(sizes) != 2:
        raise fields.fail(key, "two integers of at least 1, or null")
    return sizes[0], sizes[1]


def _awq(fields: Fields) -> AWQ:
    fields.must_be("bits", (4,))
    fields.must_be("version", ("gemm", "GEMM"))
    fields.must_be("zero_point", (True,))
    return AWQ(_group(fields))


def _gptq(fields: Fields) -> GPTQ:
    fields.must_be("bits", (4, 8))
    fields.must_be("checkpoint_format", ("gptq", "gptq_v2", "", None))
    newer = fields.values.get("checkpoint_format") == "gptq_v2"
    return GPTQ(_group(fields), fields.integer("bits"), zero_offset=0 if newer else 1)


def _group(fields: Fields) -> int | None:
    """Inputs that share a scale; -1 or null says all of them."""
    value = fields.get("group_size", -1)
    return None if value == -1 else fields.integer("group_size")


def _compressed(fields: Fields) -> CompressedTensors:
    fields.must_be("format", (*_PACKINGS, None))
    fields.mapping("sparsity_config").must_be("format", ("dense", None))
    bits: dict[int, None] = {}
    groups: dict[int | None, None] = {}
    blocks: dict[tuple[int, int], None] = {}
    schemes = fields.mapping("config_groups")
    packings = {fields.values.get("format")}
    for name in schemes.values:
        scheme = schemes.mapping(name)
        scheme.must_be("format", (*_PACKINGS, None))
        packings.add(scheme.values.get("format"))
        weights = scheme.mapping("weights")
        weights.must_be("type", ("int", "float"))
        if weights.values.get("type") == "int":
            weights.must_be("num_bits", (4, 8))
            bits[weights.integer("num_bits")] = None
            if (group := _group(weights)) is not None:
                groups[group] = None
        elif (block := _block(weights, "block_structure")) is not None:
            blocks[block] = None
    if len(groups) > 1 or len(blocks) > 1:
        sizes = [*groups] if len(groups) > 1 else [*blocks]
        raise CheckpointError(schemes.where, f"groups of sizes {sizes}", "one size in all schemes")
    fp8 = FP8Format(next(iter(blocks), None))
    return CompressedTensors(tuple(bits), next(iter(groups), None), fp8, _MXFP4 in packings)
