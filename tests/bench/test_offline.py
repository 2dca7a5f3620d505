"""The offline benchmark over the real engine."""

import json
from pathlib import Path

import jax
import pytest

from mtp_jax.bench.app import main

MODEL = Path(__file__).parents[1] / "golden" / "tiny_mimo"
# Few buckets, so that little is compiled.
ENGINE = f"--model {MODEL} --num-speculative-tokens 2 --max-num-seqs 2 --page-size 64 --prefill-chunk 16"


def run(tmp_path: Path, flags: str) -> tuple[int, dict]:
    path = tmp_path / "result.json"
    cache = str(jax.config.jax_compilation_cache_dir)  # pyright: ignore
    code = main(["offline", *ENGINE.split(), "--compile-cache", cache, "--json", str(path), *flags.split()])
    return code, json.loads(path.read_text())


def test_figures_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ["stone", {"prompt": [40, 41, 42], "max_tokens": 7}, {"prompt": [300]}, {"prompt": "x" * 200}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    load = "--output-len 12 --temperature 0 --ignore-eos --num-prompts 8 --num-warmups 1"
    code, found = run(tmp_path, f"--prompts {path} {load}")
    out = capsys.readouterr().out
    assert code == 1  # the third has no such token, the fourth does not fit
    assert found["requests"] == {"completed": 4, "failed": 4} and "failed: 2 x" in out
    reasons = list(found["failures"])
    assert "token ids from 0 to 255" in reasons[0] and "200" in reasons[1]
    each = found["per_request"]
    assert [request["output_tokens"] for request in each] == [12, 7, 0, 0] * 2
    assert [request["prompt_tokens"] for request in each] == [5, 3, 0, 0] * 2
    for request in (each[0], each[1], each[4], each[5]):
        assert request["time_to_first_token"] + sum(request["intervals"]) == pytest.approx(
            request["end_to_end"]
        )
    speculation = found["speculation"]
    # First tokens come from prompts, and a request's last round drafts nothing where one token is left;
    # every other token comes from a round with drafts, as one of them or as the target's own.
    made = speculation["num_drafts"] + speculation["num_accepted_tokens"]
    tokens = found["tokens"]["output"]
    assert tokens == 38 and tokens - 2 * 4 <= made <= tokens - 4
    assert 0 < speculation["num_draft_tokens"] <= 2 * speculation["num_drafts"]
    assert found["mode"] == "offline" and "cpu" in found["device"] and f"device    {found['device']}" in out
    assert found["settings"]["engine"]["max_num_seqs"] == 2


def test_random_prompts_of_a_chat(tmp_path: Path) -> None:
    load = "--endpoint chat --num-prompts 2 --input-len 3 --output-len 4 --ignore-eos"
    code, found = run(tmp_path, load)
    assert code == 0 and found["tokens"]["output"] == 8
    for request in found["per_request"]:  # a byte a token
        assert request["prompt_tokens"] >= len("user: to to to\nassistant:")


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offline", "--model", "/nowhere"]) == 2
    error = capsys.readouterr().err
    assert "--model" in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        main(["offline", "--page-size", "3"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "--page-size: got 3" in error and error.count("\n") == 1
