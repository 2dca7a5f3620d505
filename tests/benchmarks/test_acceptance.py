"""The acceptance table over a tiny checkpoint: real engine, figures that add up."""

import json
from pathlib import Path

import pytest

from benchmarks.acceptance import benchmark, main, parse, table

MODEL = Path(__file__).parents[1] / "golden" / "tiny_mimo"
PROMPTS = ("a stone", "the sea", "rivers", "one two")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    values = ["--model", str(MODEL), "--prompts", str(path), "--max-model-len", "128", "--max-tokens", "16"]
    # One bucket of each kind, so that little is compiled.
    settings = ("max_num_seqs=4", "min_rows=4", "prefill_chunk=16", "min_table_tokens=128")
    return [*values, *(part for setting in settings for part in ("--set", setting))]


@pytest.mark.parametrize("k", [0, 2])
def test_figures_add_up(flags: list[str], tmp_path: Path, k: int) -> None:
    out = tmp_path / "out.jsonl"
    rows = benchmark(parse([*flags, "--temperature", "0,1,1", "--json", str(out)]), k)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.temperature for row in rows] == [0, 1, 1] == [line["temperature"] for line in written]
    # Seeds are fixed: a row can be made again.
    assert (rows[1].num_tokens, rows[1].distinct_all) == (rows[2].num_tokens, rows[2].distinct_all)
    for row, line in zip(rows, written, strict=True):
        assert row.num_prompts == len(PROMPTS) and 0 < row.num_tokens <= 16 * len(PROMPTS)
        assert 0 < row.distinct_all <= row.distinct_mean <= 1
        assert line["num_tokens"] == row.num_tokens and line["circumstances"]
        counts = row.speculation
        assert len(counts.accepted_per_position) == len(row.conditional) == k
        assert (counts.num_drafts > 0) == (k > 0)
        if k:
            first, second = counts.rate_per_position
            assert first >= second and row.conditional == [first, second / first if first else 0.0]
            assert counts.mean_accepted_length == pytest.approx(1 + first + second)
            assert line["mean_accepted_length"] == counts.mean_accepted_length
    cells = [line.strip("| ").split(" | ") for line in table(rows).splitlines()]
    assert len(cells[0]) == len(cells[2]) == len(cells[3]) == 8 + max(2 * k - 1, 0)
    assert cells[2][:4] == [str(k), "0", str(len(PROMPTS)), str(rows[0].num_tokens)]


def test_what_cannot_be_measured_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--prompts", "/nowhere/p.txt"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
