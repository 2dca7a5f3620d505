"""The chat's flags and /set."""

import pytest

from mtp_jax.chat.settings import DEFAULTS, change, describe, parse_options
from mtp_jax.errors import InvalidRequestError


def test_flags() -> None:
    flags = "--system short --temperature 0 --max-tokens 9 --seed none --color never --stages 2 --model x"
    options = parse_options([*flags.split(), "--no-prefix-caching"], "chat")
    assert options.system == "short" and options.color == "never"
    assert (options.params.temperature, options.params.max_tokens, options.params.seed) == (0, 9, None)
    arguments = options.engine.llm_arguments
    assert arguments["model"] == "x" and arguments["stages"] == 2
    assert arguments["enable_prefix_caching"] is False
    assert parse_options([], "chat").params == DEFAULTS


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--temprature", "1"], "did you mean --temperature?"),
        (["--temperature", "x"], "--temperature: got 'x'; expected a finite number from 0 to 100"),
        (["--top-p", "0"], "--top-p: got 0.0"),
        (["--max-tokens", "0"], "--max-tokens: got '0'; expected an integer of at least 1, or none"),
        (["--page-size", "3"], "--page-size: got 3"),
        (["--color", "red"], "--color"),
        (["--system", ""], "--system"),
        (["--port", "8000"], "--port: no such flag"),
    ],
)
def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], part: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(flags, "chat")
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("chat: ") and part in error and error.count("\n") == 1


def test_set() -> None:
    params = change(DEFAULTS, "temperature=0.5 max_tokens=20 top_k=3")
    assert (params.temperature, params.max_tokens, params.top_k) == (0.5, 20, 3)
    assert change(params, "max_tokens=none").max_tokens is None
    assert change(params, "") == params
    assert describe(params).startswith("temperature=0.5 top_p=1.0 top_k=3 seed=none max_tokens=20")
    assert change(DEFAULTS, describe(params)) == params
    for text, field in (("top_p=2", "top_p"), ("top_p=0", "top_p"), ("n=2", "/set"), ("seed", "/set")):
        with pytest.raises(InvalidRequestError) as caught:
            change(DEFAULTS, text)
        assert caught.value.field == field
