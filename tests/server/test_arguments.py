"""Flags, the configuration file, and the one line that a mistake gets."""

from pathlib import Path

import pytest

from mtp_jax import cli
from mtp_jax.config import EngineConfig
from mtp_jax.engine.build import draw_blueprint
from mtp_jax.engine.options import EngineOptions
from mtp_jax.server.arguments import CHOSEN, FLAGS, ServeOptions, make_parser, parse_options

GOLDEN = Path(__file__).parents[1] / "golden"


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    return error


def test_defaults_are_the_dataclasses(tmp_path: Path) -> None:
    assert parse_options([]) == ServeOptions()
    assert ServeOptions().engine == EngineConfig()
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert parse_options(["--config", str(empty)]) == ServeOptions()


def test_help_names_every_default() -> None:
    text = " ".join(make_parser("x").format_help().split())
    for flags in FLAGS.values():
        for field in flags:
            default = CHOSEN.get(field, getattr(EngineConfig(), field, None))
            if field != "dtype" and default is not None:
                assert f"(default: {default})" in text, field
    assert "--host HOST" in text and "(default: 127.0.0.1)" in text


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("model", [str(GOLDEN / "tiny_mimo"), None], ids=["with MTP", "default"])
def test_help_calls_chosen_what_the_engine_chooses(
    monkeypatch: pytest.MonkeyPatch, backend: str, model: str | None
) -> None:
    """Every flag whose value is not EngineConfig's default; on CPU, the values that help names."""
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    config = draw_blueprint(EngineOptions(model=model)).config
    flags = {field for group in FLAGS.values() for field in group}
    differing = {name for name in flags if getattr(config, name, None) != getattr(EngineConfig(), name, None)}
    assert differing - {"dtype"} <= CHOSEN.keys()  # dtype's default is "auto"
    if backend == "cpu":
        for name in ("max_num_seqs", "prefill_chunk", "max_rounds"):
            assert CHOSEN[name].endswith(f"; {getattr(config, name)} on CPU")
    else:
        assert {"max_num_seqs", "prefill_chunk", "max_rounds", "dtype"} <= differing


def test_flags_reach_the_engine() -> None:
    argv = "--stages 2 --page-size 32 --no-prefix-caching --dtype bfloat16 --draft-sampling probabilistic"
    options = parse_options(argv.split())
    assert set(options.overrides) == {"stages", "page_size", "enable_prefix_caching", "draft_sampling"}
    wanted = EngineConfig(stages=2, page_size=32, enable_prefix_caching=False, draft_sampling="probabilistic")
    assert options.engine == wanted and options.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--stages", "two"], ["--stages", "'two'", "integer"]),
        (["--stages", "0"], ["--stages", "0", "at least 1"]),
        (["--page-size", "6"], ["--page-size", "6", "multiple of 4"]),
        (["--num-speculative-tokens", "9"], ["--num-speculative-tokens", "9", "0 to 8"]),
        (["--max-rounds", "3"], ["--max-rounds", "3", "1, 2, 4 or 8"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["--port", "70000"], ["--port", "70000", "0 to 65535"]),
        (["--stage", "2"], ["--stage", "did you mean --stages?"]),
        (["--wibble"], ["--wibble", "--help"]),
        (["--model"], ["--model", "expected one argument"]),
        (["word"], ["word"]),
        (["--num-pages", "5", "--kv-cache-gib", "1"], ["--kv-cache-gib", "--num-pages"]),
        (["--drain-timeout", "-1"], ["--drain-timeout", "at least 0"]),
        (["--kv-cache-gib", "nan"], ["--kv-cache-gib", "nan"]),
        (["--kv-cache-gib", "inf"], ["--kv-cache-gib", "inf", "finite"]),
        (["--drain-timeout", "inf"], ["--drain-timeout", "inf", "finite"]),
        (["--watchdog-timeout", "1e999"], ["--watchdog-timeout", "1e999", "finite"]),
        (["--max-body-mib", "nan"], ["--max-body-mib", "nan", "finite"]),
        (["--page-size", ""], ["--page-size", "''"]),
        (["--api-key", ""], ["--api-key", "''", "not empty"]),
        (["--api-key", " "], ["--api-key", "not empty"]),
        (["--host", ""], ["--host", "not empty"]),
        (["--model", ""], ["--model", "not empty"]),
        (["--config", "/nowhere.toml"], ["--config", "/nowhere.toml", "No such file"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]) -> None:
    error = _refused(capsys, *argv)
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("stages = ", ["--config", "TOML"]),
        ("stagse = 2", ["stagse", "did you mean stages?"]),
        ("stages = 'two'", ["stages", "'auto' or an integer"]),
        ("num_pages = 'two'", ["num_pages", "without quotes"]),
        ("stages = 2.5", ["stages", "2.5", "integer"]),
        ("stages = true", ["stages", "True"]),
        ("stages = 0", ["--stages", "at least 1"]),
        ("dtype = 'int8'", ["dtype", "int8", "bfloat16"]),
        ("host = 5", ["host", "quotes"]),
        ("api_key = ''", ["api_key", "not empty"]),
        ("drain_timeout = inf", ["drain_timeout", "finite"]),
        ("no_prefix_caching = 1", ["no_prefix_caching", "true or false"]),
        ("[stages]\nx = 1", ["stages"]),
        ("config = 'other.toml'", ["config", "known key"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    error = _refused(capsys, "--config", str(path))
    for part in parts:
        assert part in error


def test_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(
        "stages = 2\nport = 9000\nnum_pages = 64\nno_prefix_caching = true\nkey = 1\n".replace(
            "key = 1\n", ""
        )
    )
    options = parse_options(["--config", str(path), "--stages", "4", "--kv-cache-gib", "0.5"])
    assert options.engine.stages == 4 and options.port == 9000
    assert not options.engine.enable_prefix_caching
    assert options.kv_cache_gib == 0.5 and options.engine.num_pages == EngineConfig().num_pages


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert parse_options([]).compile_cache == "/somewhere/mtp_jax/xla"


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("mtp-jax ")
    assert cli.main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    for argv in ([], ["wibble"], ["version", "x"]):
        assert cli.main(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1
