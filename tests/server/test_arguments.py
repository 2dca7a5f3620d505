"""Flags, the configuration file, and the one line that a mistake gets."""

from pathlib import Path

import pytest

from mtp_jax import cli
from mtp_jax.config import EngineConfig
from mtp_jax.server.arguments import FLAGS, ServeOptions, make_parser, parse_options


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
            default = getattr(EngineConfig(), field, None)
            if field != "dtype" and default is not None:
                assert f"(default: {default})" in text, field
    assert "--host HOST" in text and "(default: 127.0.0.1)" in text


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
        ("stages = 'two'", ["stages", "without quotes"]),
        ("stages = 2.5", ["stages", "2.5", "integer"]),
        ("stages = true", ["stages", "True"]),
        ("stages = 0", ["--stages", "at least 1"]),
        ("dtype = 'int8'", ["dtype", "int8", "bfloat16"]),
        ("host = 5", ["host", "quotes"]),
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
