"""`python -m mtp_jax.convert`: writes a model's arrays as they are placed, for fast restarts.

Exit codes: 0, and 2 for a mistake in flags, files or models.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtp_jax.engine.prepare import default_compile_cache, prepare_jax
from mtp_jax.errors import CheckpointError, InvalidValueError, UnsupportedHereError
from mtp_jax.progress import PhaseBars, Report
from mtp_jax.server.arguments import Parser, add_flags, any_text, fail, resolve
from mtp_jax.server.signals import exit_on_signals

_ABOUT = (
    "Write a model's arrays as they are placed: `mtp-jax serve --model OUT` then starts without converting."
)
_NOTES = "OUT is for this --stages and --dtype. An MTP head that serving would use, OUT has too."


def main(argv: Sequence[str] | None = None, prog: str = "python -m mtp_jax.convert") -> int:
    """Converts a checkpoint; returns the exit code."""
    parser = Parser(prog, _ABOUT, _NOTES)
    parser.add_argument("source", type=any_text, metavar="SOURCE", help="Hugging Face directory")
    parser.add_argument("out", type=any_text, metavar="OUT", help="folder to write; new or empty")
    add_flags(parser, ("model", "layout"), without=("model", "served_model_name"))
    given = parser.given(sys.argv[1:] if argv is None else argv)
    source, out = Path(given.pop("source")), Path(given.pop("out"))
    try:
        options = resolve(given, {})
        num_devices = options.engine.stages * options.engine.tensor * options.engine.data
        prepare_jax(num_devices, default_compile_cache())
        convert(source, out, options.mtp_head, options.dtype, options.overrides, PhaseBars())
    except (InvalidValueError, UnsupportedHereError) as error:
        return fail(prog, error)
    print(f"mtp-jax serve --model {out}")
    return 0


def convert(
    source: Path,
    out: Path,
    mtp_head: str | None = None,
    dtype: str = "auto",
    layout: Mapping[str, int | bool | str | tuple[int, ...]] | None = None,
    report: Report = lambda phase, done, total: None,
) -> None:
    """Reads, places and writes a model.

    Args:
      source: a Hugging Face directory.
      out: a folder that does not exist or is empty.
      mtp_head: as the flag.
      dtype: as the flag.
      layout: fields of EngineConfig: stages, tensor.
      report: gets the progress of reading and writing.

    Raises:
      InvalidValueError, UnsupportedHereError: what cannot work, with its name.
    """
    from mtp_jax.engine.build import draw_blueprint
    from mtp_jax.engine.options import EngineOptions
    from mtp_jax.engine.placed import load_weights, require_orbax, write_placed
    from mtp_jax.loading import SafetensorsDir, resolve_model

    require_orbax()
    try:
        opened = resolve_model(source)
    except CheckpointError:
        raise
    except InvalidValueError as error:
        raise InvalidValueError("SOURCE", error.got, error.legal) from error
    if not isinstance(opened, SafetensorsDir):
        raise InvalidValueError("SOURCE", str(source), "a Hugging Face directory with safetensors")
    _empty_folder(out)
    options = EngineOptions(str(source), mtp_head=mtp_head, dtype=dtype, overrides=layout or {})
    blueprint = draw_blueprint(options)
    where = blueprint.program.layout
    weights = load_weights(
        blueprint.source,
        where,
        blueprint.read_mtp,
        lambda done, total: report("reading", done, total),
        blueprint.head,
    )
    report("writing", 0, 1)
    write_placed(out, weights, where, source)
    report("writing", 1, 1)


def _empty_folder(out: Path) -> None:
    legal = "a folder that does not exist or is empty"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise InvalidValueError("OUT", str(out), legal)
    except OSError as error:
        raise InvalidValueError("OUT", str(out), f"{legal} ({error.strerror})") from error


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
