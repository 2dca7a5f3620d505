"""Prometheus metrics: vLLM's names and meanings under the prefix `mtp_jax:`.

Two sources. Counters and histograms of requests are fed as outputs reach the front end, so that
`generation_tokens` is what clients are billed for. What only the engine knows comes from its latest
`EngineStats` at scrape time.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mtp_jax.engine.stats import EngineStats
from mtp_jax.request import EngineRequest, FinishReason, RequestOutput
from mtp_jax.server.interface import EngineCore, Timing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "mtp_jax:"

# Upper bounds of the histograms: seconds of a token, seconds of a request, tokens of an iteration.
TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
FIRST_TOKEN_SECONDS = (*TOKEN_SECONDS, 20.0, 40.0, 80.0, 160.0, 640.0)
REQUEST_SECONDS = (
    0.01,
    0.03,
    0.1,
    0.3,
    0.5,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    960.0,
)
ITERATION_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# (name, field of EngineStats, help)
GAUGES = (
    ("num_requests_running", "num_running", "Requests that hold a slot."),
    ("num_requests_waiting", "num_waiting", "Requests that wait for a slot."),
    ("kv_cache_usage_perc", "kv_cache_usage", "Share of KV pages in use; 1 is full."),
    ("host_seconds_per_dispatch", "host_seconds_per_dispatch", "Mean host time around one dispatch."),
)
COUNTERS = (
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "num_preemptions", "Requests that lost their pages and were recomputed."),
    ("spec_decode_num_drafts", "num_drafts", "Rounds that verified drafts."),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Draft tokens verified."),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Draft tokens accepted."),
    ("ring_ticks", "ticks", "Ticks of the ring, counted for each stage."),
    ("ring_useful_ticks", "useful_ticks", "Those in which the stage had work."),
)


class _EngineCollector(Collector):
    """Turns the latest EngineStats into metric families when Prometheus asks."""

    def __init__(self, model_name: str, cache_config: dict[str, str]):
        self.stats = EngineStats()
        self._labels = [model_name]
        self._cache_config = cache_config

    def collect(self) -> Iterator[Metric]:
        for name, field, text in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric(self._labels, float(getattr(self.stats, field)))
            yield gauge
        for name, field, text in COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric(self._labels, float(getattr(self.stats, field)))
            yield counter
        per_position = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the run of drafts.",
            labels=["model_name", "position"],
        )
        for position, accepted in enumerate(self.stats.num_accepted_per_position):
            per_position.add_metric([*self._labels, str(position)], float(accepted))
        yield per_position
        in_use = GaugeMetricFamily(
            PREFIX + "spec_decode_drafts_in_use",
            "Drafts a round where the engine chooses them, by the most rows a group has.",
            labels=["model_name", "rows"],
        )
        for rows, drafts in self.stats.drafts_in_use.items():
            in_use.add_metric([*self._labels, str(rows)], float(drafts))
        yield in_use
        names = ["model_name", *self._cache_config]
        info = GaugeMetricFamily(PREFIX + "cache_config_info", "How the KV cache is laid out.", labels=names)
        info.add_metric([*self._labels, *self._cache_config.values()], 1.0)
        yield info


class ServerMetrics:
    """An `Observer` of the AsyncEngine with a registry of its own. Empty until the engine is ready."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self._collector: _EngineCollector | None = None
        self._iterated = 0  # tokens counted in iteration_tokens_total so far
        self._model = ""
        self.delivered_tokens = 0  # sum of generation_tokens, for the log

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def engine_ready(self, engine: EngineCore) -> None:
        self._model = engine.model_name
        config = engine.config
        layout = {
            "block_size": str(config.page_size),
            "num_gpu_blocks": str(config.num_pages * config.data),
            "cache_dtype": config.dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
        }
        self._collector = _EngineCollector(self._model, layout)
        self._collector.stats = EngineStats(num_accepted_per_position=(0,) * config.num_speculative_tokens)
        self._registry.register(self._collector)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens; once for all n choices.")
        self._generation_tokens = self._counter("generation_tokens", "Completion tokens delivered.")
        self._success = Counter(
            PREFIX + "request_success",
            "Requests ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in FinishReason:
            self._success.labels(self._model, reason.value)
        self._first = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_SECONDS
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between the deliveries of a request.", TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first.", TOKEN_SECONDS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", REQUEST_SECONDS
        )
        self._queued = self._histogram("request_queue_time_seconds", "Waiting for a slot.", REQUEST_SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the slot to the first token.", REQUEST_SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_SECONDS
        )
        self._iteration = self._histogram(
            "iteration_tokens_total", "Prompt and completion tokens of one engine step.", ITERATION_TOKENS
        )

    def output(self, request: EngineRequest, timing: Timing, output: RequestOutput, now: float) -> None:
        """Counts one increment; `timing` is as it was before it."""
        if output.queued_seconds is not None:
            self._queued.observe(output.queued_seconds)
        if output.token_ids:
            self._generation_tokens.inc(len(output.token_ids))
            self.delivered_tokens += len(output.token_ids)
            if timing.first is None:
                self._first_token(request, timing, output, now)
            else:
                self._between.observe(now - (timing.last or now))
        if output.finish_reason is not None:
            num_tokens = timing.num_tokens + len(output.token_ids)
            last = now if output.token_ids else (timing.last or now)
            first = timing.first if timing.first is not None else last
            self._success.labels(self._model, output.finish_reason.value).inc()
            self._whole.observe(now - timing.arrived)
            self._decode.observe(last - first)
            if num_tokens == 0 and output.error is None:  # max_tokens was 0: the prompt was all
                self._count_prompt(request)
            if num_tokens > 1:
                self._per_token.observe((last - first) / (num_tokens - 1))

    def _first_token(self, request: EngineRequest, timing: Timing, output: RequestOutput, now: float) -> None:
        self._first.observe(now - timing.arrived)
        if output.queued_seconds is not None:
            self._prefill.observe(max(0.0, now - timing.arrived - output.queued_seconds))
        self._count_prompt(request)

    def _count_prompt(self, request: EngineRequest) -> None:
        if request.shares_prompt_with is None:  # usage bills the prompt of n choices once, and so do we
            self._prompt_tokens.inc(len(request.prompt_token_ids))

    def aborted(self, request: EngineRequest, timing: Timing, now: float) -> None:
        self._success.labels(self._model, FinishReason.ABORT.value).inc()
        self._whole.observe(now - timing.arrived)

    def stepped(self, stats: EngineStats) -> None:
        if self._collector is None:
            return
        self._collector.stats = stats
        done = stats.prompt_tokens + stats.generation_tokens
        if done > self._iterated:
            self._iteration.observe(done - self._iterated)
            self._iterated = done

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model)


def describe_load(before: EngineStats, after: EngineStats, tokens: int, seconds: float) -> str:
    """One line about the last `seconds` for the log.

    Args:
      tokens: completion tokens delivered meanwhile.
    """
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    acceptance = f", acceptance {accepted / drafted:.1%}" if drafted else ""
    return (
        f"running {after.num_running}, waiting {after.num_waiting}, {tokens / seconds:.1f} tokens/s"
        f"{acceptance}, KV cache {after.kv_cache_usage:.1%}"
    )
