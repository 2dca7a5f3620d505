"""OpenTelemetry traces: how long each request waited, was prefilled and decoded. Needs the extra `otel`."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtp_jax.engine.stats import EngineStats
from mtp_jax.errors import InvalidValueError
from mtp_jax.request import EngineRequest, FinishReason, RequestOutput
from mtp_jax.server.interface import EngineCore, Observer, Timing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

FLAG = "--otlp-traces-endpoint"


def otlp_provider(endpoint: str, version: str) -> "TracerProvider":
    """Sends spans in batches to an OTLP/HTTP collector, from a thread of its own.

    Raises:
      InvalidValueError: the packages of the extra are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        legal = f"the extra otel to be installed: pip install 'mtp-jax[otel]' ({error})"
        raise InvalidValueError(FLAG, endpoint, legal) from None
    resource = Resource.create({"service.name": "mtp-jax", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class TraceObserver:
    """An `Observer` that makes a span of each request when it ends: `llm_request`, and the phases in it."""

    def __init__(self, provider: "TracerProvider"):
        self._provider, self._tracer = provider, provider.get_tracer("mtp_jax.server")
        self._model = ""
        self._started: dict[str, float] = {}  # request -> when it got its slot, monotonic seconds

    def engine_ready(self, engine: EngineCore) -> None:
        self._model = engine.model_name

    def output(self, request: EngineRequest, timing: Timing, output: RequestOutput, now: float) -> None:
        """Notes one increment; `timing` is as it was before it."""
        if output.queued_seconds is not None:
            self._started[request.request_id] = timing.arrived + output.queued_seconds
        if output.finish_reason is None:
            return
        first = now if timing.first is None and output.token_ids else timing.first
        tokens = timing.num_tokens + len(output.token_ids)
        attributes: dict[str, str | int | float] = {"gen_ai.usage.completion_tokens": tokens}
        attributes["gen_ai.usage.cached_tokens"] = output.num_cached_tokens
        if output.speculation is not None:
            attributes["mtp_jax.num_draft_tokens"] = output.speculation.num_draft_tokens
            attributes["mtp_jax.num_accepted_tokens"] = output.speculation.num_accepted_tokens
        self._end(request, timing, first, now, output.finish_reason, attributes)

    def aborted(self, request: EngineRequest, timing: Timing, now: float) -> None:
        attributes: dict[str, str | int | float] = {"gen_ai.usage.completion_tokens": timing.num_tokens}
        self._end(request, timing, timing.first, now, FinishReason.ABORT, attributes)

    def stepped(self, stats: EngineStats) -> None:
        """Steps have no spans: there are too many of them."""

    def close(self) -> None:
        """Sends what is left, for a few seconds at most."""
        self._provider.force_flush(3000)
        self._provider.shutdown()

    def _end(
        self,
        request: EngineRequest,
        timing: Timing,
        first: float | None,
        now: float,
        reason: FinishReason,
        attributes: dict[str, str | int | float],
    ) -> None:
        from opentelemetry.trace import set_span_in_context

        slot = self._started.pop(request.request_id, None)
        params = request.params
        attributes |= {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.latency.e2e": now - timing.arrived,
            "mtp_jax.finish_reason": reason.value,
        }
        if first is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first - timing.arrived
        if slot is not None:
            attributes["gen_ai.latency.time_in_queue"] = slot - timing.arrived
        offset = time.time() - time.monotonic()  # to wall-clock time
        span = self._tracer.start_span(
            "llm_request", attributes=attributes, start_time=_nanoseconds(timing.arrived + offset)
        )
        times = (("queue", timing.arrived, slot), ("prefill", slot, first), ("decode", first, now))
        for name, start, end in times:
            if start is not None:  # the phase that an abort cut short ends with it
                start_time = _nanoseconds(start + offset)
                child = self._tracer.start_span(name, set_span_in_context(span), start_time=start_time)
                child.end(_nanoseconds(max(start, now if end is None else end) + offset))
        span.end(_nanoseconds(now + offset))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]):
        self._observers = tuple(observers)

    def engine_ready(self, engine: EngineCore) -> None:
        for observer in self._observers:
            observer.engine_ready(engine)

    def output(self, request: EngineRequest, timing: Timing, output: RequestOutput, now: float) -> None:
        for observer in self._observers:
            observer.output(request, timing, output, now)

    def aborted(self, request: EngineRequest, timing: Timing, now: float) -> None:
        for observer in self._observers:
            observer.aborted(request, timing, now)

    def stepped(self, stats: EngineStats) -> None:
        for observer in self._observers:
            observer.stepped(stats)
