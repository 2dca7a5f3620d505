"""The counters add up, under vLLM's names."""

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import local_server

NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_tokens_total",
    "cache_config_info",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
)


def _scrape(url: str) -> dict[tuple[str, tuple], float]:
    found = {}
    for family in text_string_to_metric_families(httpx.get(url + "/metrics").text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m"
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_metrics_add_up() -> None:
    flags = "--num-speculative-tokens 3 --served-model-name m --num-pages 256"
    with (
        local_server(*flags.split()) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client,
    ):
        usages = []
        for length in range(1, 12):
            prompt = "a shared beginning of some length, then " + "b" * length
            answer = client.completions.create(
                model="m",
                prompt=prompt,
                max_tokens=length,
                n=2,
                extra_body={"num_speculative_tokens": length % 4},
            )
            usages.append(answer.usage)
        found = _scrape(server.url)
    prefix = "mtp_jax:"
    assert {name for name in NAMES if not any(key.startswith(prefix + name) for key, _ in found)} == set()

    def value(name: str, **labels: str) -> float:
        return found[prefix + name, tuple(sorted(labels.items()))]

    completion = sum(usage.completion_tokens for usage in usages)
    assert value("generation_tokens_total") == completion == sum(2 * length for length in range(1, 12))
    assert value("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert value("request_success_total", finished_reason="length") == 22
    assert value("request_success_total", finished_reason="abort") == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert value(name + "_count") == 22
    assert value("request_time_per_output_token_seconds_count") == 20  # the one-token answers have none
    accepted = value("spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= value("spec_decode_num_draft_tokens_total")
    per_position = [value("spec_decode_num_accepted_tokens_per_pos_total", position=str(p)) for p in range(3)]
    assert sum(per_position) == accepted and per_position == sorted(per_position, reverse=True)
    assert value("iteration_tokens_total_sum") == completion + server.engine.stats().prompt_tokens
    assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
