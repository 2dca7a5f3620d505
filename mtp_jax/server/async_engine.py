"""The engine's thread, and the asyncio side that talks to it.

One thread builds the engine and then steps it; nothing else ever touches it. The event loop sends
commands (admit, abort) through a locked list, and gets each step's outputs with a single wake-up.

    loop:    submit -> commands            deliver -> queue of each submission -> HTTP
    thread:            admit, abort, step -> outputs --^
"""

import asyncio
import collections
import dataclasses
import enum
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from mtp_jax.engine.stats import EngineStats
from mtp_jax.errors import EngineDeadError, InvalidRequestError
from mtp_jax.progress import Report
from mtp_jax.request import EngineRequest, RequestOutput
from mtp_jax.server.interface import EngineCore, Observer, Timing
from mtp_jax.server.refusals import (
    OverloadedError,
    RequestTimeoutError,
    ServerStoppingError,
    SlowClientError,
)

log = logging.getLogger(__name__)

# Where each phase of loading starts and ends, in percent of the whole.
MAX_UNREAD = 4096  # outputs of a request that its client has not fetched; then it is ended
PHASES = {"reading": (0.0, 25.0), "placing": (25.0, 35.0), "compiling": (35.0, 100.0)}


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"  # closed as asked
    DEAD = "dead"  # see `failure`


@dataclasses.dataclass
class _Admit:
    requests: tuple[EngineRequest, ...]
    accepted: asyncio.Future[None]


@dataclasses.dataclass
class _Abort:
    request_ids: tuple[str, ...]


class Submission:
    """Requests that were admitted together. Iterate for (index of the request, output) as they come."""

    def __init__(self, owner: "AsyncEngine", requests: Sequence[EngineRequest]):
        self.requests = tuple(requests)
        now = time.monotonic()
        self.timings = {request.request_id: Timing(now) for request in self.requests}
        self._owner = owner
        self._index = {request.request_id: index for index, request in enumerate(self.requests)}
        self._queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._unread = set(self._index)  # requests whose last output has not been read
        self.unfinished = set(self._index)  # requests that the engine still works on
        self.timeout: asyncio.TimerHandle | None = None

    def put(self, item: RequestOutput | Exception) -> None:
        self._queue.put_nowait(item)

    @property
    def reads_too_slowly(self) -> bool:
        return self._queue.qsize() > MAX_UNREAD * len(self.requests)

    def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._unread:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        if item.error is not None:
            raise item.error
        if item.finish_reason is not None:
            self._unread.discard(item.request_id)
        return self._index[item.request_id], item

    def close(self) -> None:
        """Aborts what is unfinished. To be called always, on the event loop."""
        if self.timeout is not None:
            self.timeout.cancel()
        self._owner.abort(tuple(self.unfinished))


class AsyncEngine:
    """Runs an engine in a thread of its own and serves its outputs to coroutines.

    Args:
      build: makes the engine; called in the engine's thread with a function to report progress to.
      observer: the metrics.
      on_progress: shows progress to a person; called in the engine's thread.
      watchdog_seconds: where no dispatch finishes for longer although there is work, the engine hangs
        (`healthy` is False).
      max_queued: completions that may wait besides those that have a slot.
      request_seconds: what takes longer than this after it was submitted is ended; 0 is no limit.
    """

    def __init__(
        self,
        build: Callable[[Report], EngineCore],
        observer: Observer | None = None,
        on_progress: Report | None = None,
        watchdog_seconds: float = 300.0,
        max_queued: int = 1024,
        request_seconds: float = 0.0,
    ):
        self._max_queued, self._request_seconds = max_queued, request_seconds
        self._build, self._observer, self._on_progress = build, observer, on_progress
        self._watchdog_seconds = watchdog_seconds
        self._commands: collections.deque[_Admit | _Abort] = collections.deque()
        self._wake = threading.Condition()
        self._stop = False
        self._waiting_since: float | None = None  # that there is work and no dispatch has finished
        self._live: dict[str, Submission] = {}
        self._admitting: set[asyncio.Future[None]] = set()
        self._engine: EngineCore | None = None
        self.state = State.LOADING
        self.failure: BaseException | None = None
        self.draining = False
        self.percent, self.phase = 0.0, "starting"
        self.latest_stats = EngineStats()

    # Event loop side.

    def start(self) -> None:
        """Starts the thread. To be called on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.loaded = asyncio.Event()  # set when READY, and when loading failed
        self.ended = asyncio.Event()  # set when DEAD or STOPPED
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> EngineCore:
        """The engine, for its constants (config, tokenizer, model_name) only."""
        assert self._engine is not None, "asked for the engine before it was ready"
        return self._engine

    @property
    def healthy(self) -> bool:
        """False when dead, or when work waits for a dispatch for longer than the watchdog allows."""
        started = self._waiting_since
        hung = started is not None and time.monotonic() - started > self._watchdog_seconds
        return self.state is not State.DEAD and not hung

    @property
    def capacity(self) -> int:
        """Completions that may be live: those with a slot and those that wait."""
        return self.engine.config.max_num_seqs + self._max_queued

    async def submit(self, requests: Sequence[EngineRequest]) -> Submission:
        """Admits all of `requests` or none. The caller must close() what it gets.

        Raises:
          InvalidRequestError: the engine can never serve one of them, or never so many.
          OverloadedError: too many requests wait.
          ServerStoppingError: the server drains; another one may answer.
          EngineDeadError: the engine is not running.
        """
        if self.draining:  # a request that was still being tokenized when the drain began
            raise ServerStoppingError("the server is shutting down")
        if self.state is not State.READY:
            raise EngineDeadError(f"the engine is {self.state.value}")
        if len(requests) > self.capacity:
            legal = f"at most {self.capacity} completions a call"
            raise InvalidRequestError("n", f"{len(requests)} completions", legal)
        if len(self._live) + len(requests) > self.capacity:
            raise OverloadedError(f"{len(self._live)} completions run or wait")
        submission = Submission(self, requests)
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._live.update(dict.fromkeys(submission.timings, submission))
        self._idle.clear()
        self._admitting.add(accepted)
        self._send(_Admit(submission.requests, accepted))
        try:
            await accepted
        except BaseException as error:
            if isinstance(error, InvalidRequestError):  # the engine holds none of them
                self._forget(submission.unfinished)
            else:
                submission.close()
            raise
        finally:
            self._admitting.discard(accepted)
        if self._request_seconds:
            submission.timeout = self._loop.call_later(self._request_seconds, self._expire, submission)
        return submission

    def _expire(self, submission: Submission) -> None:
        if submission.unfinished:
            self._cut(submission, RequestTimeoutError(f"not finished within {self._request_seconds:g} s"))

    def _cut(self, submission: Submission, error: Exception) -> None:
        """Ends what is left of a submission; its reader gets what came before, and then the error."""
        self.abort(tuple(submission.unfinished))
        submission.put(error)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown and finished ones are left alone."""
        now = time.monotonic()
        known = tuple(request_id for request_id in request_ids if request_id in self._live)
        for request_id in known:
            submission = self._live[request_id]
            if self._observer is not None:
                index = submission._index[request_id]
                self._observer.aborted(submission.requests[index], submission.timings[request_id], now)
        self._forget(known)
        if known:
            self._send(_Abort(known))

    @property
    def num_live(self) -> int:
        """Requests that have been submitted and are not finished."""
        return len(self._live)

    async def drain(self, timeout: float) -> bool:
        """Waits until no request is live; after `timeout` seconds cuts the rest off. True if none was cut."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for submission in set(self._live.values()):
                text = "the server is shutting down and its drain time is over"
                self._cut(submission, ServerStoppingError(text))
            return False
        return True

    def stop(self) -> None:
        """Asks the thread to close the engine and end; `ended` tells when it has."""
        with self._wake:
            self._stop = True
            self._wake.notify()

    def _send(self, command: _Admit | _Abort) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in tuple(request_ids):
            submission = self._live.pop(request_id, None)
            if submission is not None:
                submission.unfinished.discard(request_id)
        if not self._live:
            self._idle.set()

    def _deliver(self, outputs: list[RequestOutput], now: float) -> None:
        for output in outputs:
            submission = self._live.get(output.request_id)
            if submission is None:  # aborted while the step ran
                continue
            timing = submission.timings[output.request_id]
            if self._observer is not None:
                request = submission.requests[submission._index[output.request_id]]
                self._observer.output(request, timing, output, now)
            if output.token_ids:
                timing.first = now if timing.first is None else timing.first
                timing.last = now
                timing.num_tokens += len(output.token_ids)
            submission.put(output)
            if output.finish_reason is not None:
                self._forget((output.request_id,))
            elif submission.reads_too_slowly:
                self._cut(submission, SlowClientError("the client reads its answer too slowly"))

    def _became_ready(self) -> None:
        if self._observer is not None:
            self._observer.engine_ready(self.engine)
        self.state = State.READY
        self.loaded.set()

    def fail(self, error: BaseException) -> None:
        """Ends the engine for those who wait for it, whatever its thread is doing. From any thread."""
        self._post(self._ended, error)

    def _ended(self, failure: BaseException | None) -> None:
        if self.ended.is_set():
            return
        self.failure = failure
        self.state = State.STOPPED if failure is None else State.DEAD
        error = EngineDeadError(
            "the engine has stopped" if failure is None else f"the engine died: {failure!r}"
        )
        for accepted in self._admitting:
            if not accepted.done():
                accepted.set_exception(error)
        waiting = set(self._live.values())
        self._forget(tuple(self._live))
        for submission in waiting:
            submission.put(error)
        self.loaded.set()
        self.ended.set()

    # Engine thread side.

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens any more
            log.debug("dropped %s: the event loop is closed", callback.__name__)

    def _report(self, phase: str, done: float, total: float) -> None:
        low, high = PHASES.get(phase, (self.percent, self.percent))
        fraction = min(1.0, done / total) if total > 0 else 1.0
        self.phase, self.percent = phase, max(self.percent, low + (high - low) * fraction)
        if self._on_progress is not None:
            self._on_progress(phase, done, total)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._engine = self._build(self._report)
            self.percent, self.phase = 100.0, "ready"
            self.latest_stats = self._engine.stats()
            self._post(self._became_ready)
            self._serve(self._engine)
        except BaseException as error:  # whatever it is, the clients and the process must hear of it
            failure = error
            if self._engine is not None:  # errors of loading are the caller's to report
                log.critical("the engine died", exc_info=error)
            self._post(self._ended, failure)  # before closing, which may wait for a compiler or hang
        try:
            if self._engine is not None:
                self._engine.close()
        except Exception as error:
            log.exception("closing the engine failed")
            if failure is None:
                self._post(self._ended, error)
        else:
            if failure is None:
                self._post(self._ended, None)

    def _serve(self, engine: EngineCore) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._stop or engine.has_work()):
                    self._wake.wait()
                if self._stop:
                    return
                commands = tuple(self._commands)
                self._commands.clear()
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
            ticks = self.latest_stats.ticks
            for command in commands:
                self._execute(engine, command)
            outputs = engine.step() if engine.has_work() else []
            stats = self.latest_stats = engine.stats()
            held = stats.num_running == 0 and stats.is_compiling  # everybody waits for a compiler, as told
            if outputs or stats.ticks != ticks or held or not engine.has_work():
                self._waiting_since = None
            self._post(self._publish, outputs, time.monotonic(), self.latest_stats)

    def _publish(self, outputs: list[RequestOutput], now: float, stats: EngineStats) -> None:
        self._deliver(outputs, now)
        if self._observer is not None:
            self._observer.stepped(stats)

    def _execute(self, engine: EngineCore, command: _Admit | _Abort) -> None:
        if isinstance(command, _Abort):
            for request_id in command.request_ids:
                engine.abort(request_id)
            return
        admitted: list[str] = []
        try:
            for request in command.requests:
                engine.add_request(request)
                admitted.append(request.request_id)
        except InvalidRequestError as error:
            for request_id in admitted:
                engine.abort(request_id)
            self._post(_resolve, command.accepted, error)
        else:
            self._post(_resolve, command.accepted, None)


def _resolve(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # the submitter was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
