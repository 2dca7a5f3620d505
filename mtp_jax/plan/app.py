"""The command line of the planner.

Exit codes: 0 if the model fits, 1 if it does not, 2 for a mistake in flags or files.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtp_jax.config import ModelConfig
from mtp_jax.engine.auto_layout import Devices, NothingFitsError, wants_layout
from mtp_jax.engine.build import choose_layout
from mtp_jax.engine.options import EngineOptions
from mtp_jax.errors import InvalidValueError, UnsupportedHereError
from mtp_jax.loading import GGUFFile
from mtp_jax.loading.formats import planned_blocks
from mtp_jax.loading.hf_config import config_from_directory
from mtp_jax.models.registry import expected_tensors
from mtp_jax.plan.devices import DEVICES, Device
from mtp_jax.plan.draw import draw_plan
from mtp_jax.plan.report import as_json, table
from mtp_jax.plan.search import LARGEST, nearest
from mtp_jax.server.arguments import Parser, add_flags, fail, make_parser, read_file, resolve
from mtp_jax.server.backend import engine_options
from mtp_jax.server.readers import number

_NOT_HERE = ("model", "served_model_name", "mtp_head", "compile_cache")


def main(argv: Sequence[str] | None = None, prog: str = "mtp-jax plan") -> int:
    """Prints a plan; returns the exit code."""
    parser = _parser(prog)
    given = parser.given(sys.argv[1:] if argv is None else argv)
    device = DEVICES[given.pop("device")]
    for_programs, preset = given.pop("json", False), given.pop("config", None)
    devices = given.pop("devices", None)
    try:
        from_file = {} if preset is None else read_file(make_parser(prog), preset)
        options = engine_options(resolve(given, from_file))
        model = read_config(options.model)
        float8 = _float8(options.model, model)
        options = with_layout(options, model, device, devices, float8)
        plan = draw_plan(model, options, device, float8)
        changes = () if plan.fits else nearest(plan, options)
    except NothingFitsError as error:
        print(f"does not fit: {error.legal}")
        return 1
    except (InvalidValueError, UnsupportedHereError) as error:
        return fail(prog, error)
    print(as_json(plan, changes) if for_programs else table(plan, changes))
    return 0 if plan.fits else 1


def read_config(model: str | None) -> ModelConfig:
    """The configuration of a directory with `config.json`, that file itself, or a GGUF file.

    Raises:
      InvalidValueError: there is none, or one that no family here runs.
    """
    legal = "a directory with a config.json, that file, or a .gguf file"
    if model is None:
        raise InvalidValueError("MODEL_OR_CONFIG", None, legal)
    path = Path(model).expanduser()
    if path.is_dir():
        return config_from_directory(path)
    if path.is_file() and path.name == "config.json":
        return config_from_directory(path.parent)
    if path.is_file() and path.suffix == ".gguf":
        return GGUFFile(path).config
    raise InvalidValueError("MODEL_OR_CONFIG", model, legal)


def with_layout(
    options: EngineOptions,
    model: ModelConfig,
    device: Device,
    devices: int | None,
    float8: Mapping[str, int],
) -> EngineOptions:
    """The options with numbers for the axes that are `auto`, for so many devices.

    Raises:
      NothingFitsError: no layout of them holds the model.
      InvalidValueError: an axis is `auto` and nobody said how many devices there are.
    """
    if devices is None:
        if wants_layout(options.overrides):
            raise InvalidValueError("--devices", None, "how many there are, where a part of the mesh is auto")
        return options
    has_mtp = model.num_nextn_predict_layers > 0
    there = Devices(devices)
    return choose_layout(options, model, there, device.usable, float8, has_mtp=has_mtp, on_cpu=False)


def _float8(model: str | None, config: ModelConfig) -> dict[str, int]:
    """Columns that share a scale, of each tensor that is in float8 by config.json."""
    path = Path(model or "").expanduser()
    directory = path if path.is_dir() else path.parent
    return {} if path.suffix == ".gguf" else planned_blocks(directory, expected_tensors(config))


def _parser(prog: str) -> Parser:
    about = "Will a model fit? Stages, bytes a device and what to change, from config.json alone."
    parser = Parser(prog, about, "Flags that are not given are chosen as on an accelerator.")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL_OR_CONFIG", help="a directory with config.json, or that file"
    )
    parser.add_argument("--device", choices=tuple(DEVICES), required=True, help="what every device is")
    parser.add_argument(
        "--devices",
        type=number(int, 1, LARGEST),
        metavar="N",
        help="how many there are, for --stages, --tensor or --data auto",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.add_argument("--config", metavar="FILE", help="TOML file of flags, as for serving")
    add_flags(parser, ("model", "layout", "engine"), without=_NOT_HERE)
    parser.add_argument(
        "--max-len",
        dest="max_model_len",
        type=number(int, 0),
        metavar="LEN",
        help="short for --max-model-len",
    )
    return parser
