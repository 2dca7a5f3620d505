"""Figures against values worked out by hand."""

import itertools
import json
import random
import statistics

import pytest

from mtp_jax.bench.acceptance import SpeculationCounts, from_engine, from_metrics
from mtp_jax.bench.circumstances import command_line
from mtp_jax.bench.prompts import arrivals
from mtp_jax.bench.records import Record, distribution, summarize
from mtp_jax.bench.report import Report
from mtp_jax.engine.stats import EngineStats

# Four tokens, the last two in one chunk; the finish reason comes half a second later.
SLOW = Record(10.0, 13.5, (11.0, 12.0, 13.0), num_prompt_tokens=5, num_output_tokens=4)
QUICK = Record(10.5, 11.0, (11.0,), num_prompt_tokens=3, num_output_tokens=1)
FAILED = Record(10.0, 99.0, (20.0, 40.0), error="HTTP 400: no")
COUNTS = SpeculationCounts(8, 24, 12, (6, 4, 2))


def test_one_request() -> None:
    assert SLOW.first_token_seconds == 1.0
    assert SLOW.intervals == [1.0, 1.0]
    assert SLOW.seconds_per_output_token == pytest.approx(2.5 / 3)
    assert SLOW.end_to_end_seconds == 3.5
    assert QUICK.seconds_per_output_token is None and QUICK.intervals == []
    silent = Record(1.0, 3.0, (), num_output_tokens=1)  # tokens that make no text
    assert silent.first_token_seconds == 2.0


def test_percentiles_are_interpolated() -> None:
    found = distribution([4.0, 1.0, 3.0, 2.0])
    assert found is not None and found.count == 4 and found.mean == 2.5
    # Place 1 + 3 p among the sorted values: 2.5, 3.7, 3.85, 3.97.
    assert found.percentiles == pytest.approx((2.5, 3.7, 3.85, 3.97))
    one = distribution([7.0])
    assert one is not None and one.percentiles == (7.0,) * 4
    assert distribution([]) is None


def test_all_requests_together() -> None:
    summary = summarize([SLOW, QUICK, FAILED, FAILED])
    assert (summary.num_completed, summary.num_failed) == (2, 2)
    assert summary.failures == {"HTTP 400: no": 2}
    assert summary.seconds == 3.5  # a failure does not stretch it
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (8, 5)
    assert summary.rate(5) == pytest.approx(5 / 3.5)
    means = {name: found and (found.count, found.mean) for name, found in summary.latencies.items()}
    assert means == {
        "time_to_first_token": (2, 0.75),
        "inter_token_latency": (2, 1.0),
        "time_per_output_token": (1, pytest.approx(2.5 / 3)),
        "end_to_end": (2, 2.0),
    }


def test_nothing_completed() -> None:
    summary = summarize([FAILED])
    assert summary.seconds == 0.0 and summary.rate(3) == 0.0
    assert set(summary.latencies.values()) == {None}
    report = Report("serve", "m", "there", None, {}, [FAILED], None)
    assert "1 failed" in report.table() and "failed: 1 x HTTP 400: no" in report.table()
    assert json.loads(report.as_json())["latency_seconds"]["end_to_end"] is None


def test_the_table() -> None:
    table = Report("offline", "m", "here", "1 x cpu", {}, [SLOW, QUICK], COUNTS).table()
    for line in (
        "requests                2 completed, 0 failed, 3.50 s",
        "throughput              0.57 requests/s, 1.4 output tokens/s, 3.7 total tokens/s",
        "  time to first token       750.00    750.00    950.00    975.00    995.00",
        "  time per output token     833.33    833.33    833.33    833.33    833.33",
        "by position 75.0%, 50.0%, 25.0%; of all drafts 50.0%; accepted length 2.50",
        "device    1 x cpu",
    ):
        assert line in table


def test_json_has_every_request() -> None:
    values = json.loads(Report("offline", "m", "here", None, {"seed": 1}, [SLOW, FAILED], COUNTS).as_json())
    assert values["per_request"][0]["intervals"] == [1.0, 1.0]
    assert values["per_request"][0]["sent"] == 0.0
    assert values["per_request"][1]["error"] == "HTTP 400: no"
    assert values["speculation"]["acceptance_per_position"] == [0.75, 0.5, 0.25]
    assert values["speculation"]["mean_accepted_length"] == 2.5
    assert {"cpu", "date", "command", "versions"} <= values["circumstances"].keys()
    assert {"Python", "jax", "mtp-jax"} <= values["circumstances"]["versions"].keys()


VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 5.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 3.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 6.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 3.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 1.0
"""


def test_the_metrics_of_vllm_are_added_up_over_engines() -> None:
    found = from_metrics(VLLM)
    assert found.num_unfinished == 3
    assert found.speculation == SpeculationCounts(8, 16, 9, (6, 3))
    assert from_metrics("# TYPE up gauge\nup 1\n").speculation is None
    with pytest.raises(ValueError):
        from_metrics("<html>no metrics</html>")


def test_counts_of_the_time_between() -> None:
    later = SpeculationCounts(18, 44, 22, (11, 7, 4))
    assert later.since(COUNTS) == SpeculationCounts(10, 20, 10, (5, 3, 2))
    assert later.since(SpeculationCounts(0, 0, 0, ())) == later  # a server that names no position at first
    assert later.since(later).rate_per_position == (0.0, 0.0, 0.0)
    stats = EngineStats(
        num_drafts=8, num_draft_tokens=24, num_accepted_tokens=12, num_accepted_per_position=(6, 4, 2)
    )
    assert from_engine(stats) == COUNTS


def test_arrivals() -> None:
    assert list(arrivals(3, float("inf"), random.Random(0))) == [0.0, 0.0, 0.0]
    due = list(arrivals(4001, 20.0, random.Random(0)))
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert due[0] == 0.0 and min(gaps) > 0
    # 4000 exponential gaps: the mean is within 5 standard errors (0.05 / sqrt(4000)), and so is the
    # deviation, whose standard error is about sqrt(2) times as large.
    assert statistics.mean(gaps) == pytest.approx(0.05, abs=0.004)
    assert statistics.stdev(gaps) == pytest.approx(0.05, abs=0.006)


def test_the_command_shows_no_key() -> None:
    words = ["/usr/bin/python3", "-m", "mtp_jax.bench", "serve", "--api-key", "secret", "--seed", "3"]
    assert command_line(words) == "python -m mtp_jax.bench serve --api-key ... --seed 3"
    assert "secret" not in command_line(["python", "--api-key=secret"])
