"""The engine's thread: outputs in order, aborts, and no hang when it dies."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mtp_jax.config import EngineConfig
from mtp_jax.engine.stats import EngineStats
from mtp_jax.errors import EngineDeadError, InvalidRequestError
from mtp_jax.request import EngineRequest, RequestOutput, SamplingParams, expand_request
from mtp_jax.server.async_engine import AsyncEngine, State
from mtp_jax.server.refusals import ServerStoppingError
from tests.server.scripted import ScriptedEngine


def _request(name: str, prompt: str, **params) -> EngineRequest:
    return expand_request(name, [ord(c) for c in prompt], SamplingParams(temperature=0, **params))[0]


async def _generate(engine: AsyncEngine, request: EngineRequest) -> AsyncIterator[RequestOutput]:
    submission = await engine.submit([request])
    try:
        async for _, output in submission:
            yield output
    finally:
        submission.close()


def _run(
    body: Callable[[AsyncEngine, ScriptedEngine], Awaitable[None]], step_seconds: float = 0.0
) -> ScriptedEngine:
    core = ScriptedEngine(EngineConfig(max_num_seqs=2, num_pages=32), step_seconds)

    async def main() -> None:
        engine = AsyncEngine(lambda report: core)
        engine.start()
        await engine.loaded.wait()
        await body(engine, core)
        engine.stop()
        await asyncio.wait_for(engine.ended.wait(), 5)

    asyncio.run(main())
    return core


def test_outputs() -> None:
    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        outputs = [output async for output in _generate(engine, _request("a", "abc!", max_tokens=9))]
        assert "".join(output.text for output in outputs) == "abc"
        assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]
        assert outputs[-1].stop_reason is None  # the end-of-sequence token is no stop token
        assert engine.num_live == 0

    assert _run(body).closed


def test_a_stop_token_is_the_stop_reason() -> None:
    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        request = _request("a", "abc", stop_token_ids=(ord("b"),))
        assert [output.stop_reason async for output in _generate(engine, request)][-1] == ord("b")

    _run(body)


def test_many_at_once_keep_their_own_text() -> None:
    async def one(engine: AsyncEngine, number: int) -> None:
        prompt = f"<{number}>"
        text = ""
        async for output in _generate(engine, _request(f"r{number}", prompt, max_tokens=3 * len(prompt))):
            text += output.text
        assert text == prompt * 3

    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        await asyncio.gather(*(one(engine, number) for number in range(50)))

    _run(body)


def test_leaving_the_generator_aborts() -> None:
    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        outputs = _generate(engine, _request("a", "abc", max_tokens=500))
        await anext(outputs)
        await outputs.aclose()
        assert engine.num_live == 0
        while core.has_work():
            await asyncio.sleep(0.01)

    _run(body, step_seconds=0.005)


def test_cancelling_aborts_even_before_admission() -> None:
    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        blocker = await engine.submit([_request("b", "HANG", max_tokens=1)])
        await asyncio.sleep(0.05)
        task = asyncio.create_task(engine.submit([_request("a", "abc", max_tokens=500)]))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        core.release.set()
        assert [output async for output in blocker]
        await asyncio.sleep(0.05)
        assert not core.has_work() and engine.num_live == 0

    _run(body)


def test_admission_is_all_or_nothing() -> None:
    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        with pytest.raises(InvalidRequestError, match="KV pages"):
            await engine.submit([_request("a", "abc"), _request("b", "x" * 1000)])
        assert engine.num_live == 0 and not core.has_work()

    _run(body)


def test_a_dead_engine_ends_everything() -> None:
    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        running = await engine.submit([_request("a", "abc", max_tokens=500)])
        crashing = await engine.submit([_request("b", "CRASH")])
        for submission in (running, crashing):
            with pytest.raises(EngineDeadError, match="the script says CRASH"):
                while True:
                    await anext(submission)
        assert engine.state is State.DEAD and not engine.healthy
        with pytest.raises(EngineDeadError):
            await engine.submit([_request("c", "abc")])
        # Clients are told first; the engine's own thread closes it after that.
        deadline = time.monotonic() + 10
        while not core.closed and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    assert _run(body).closed


def test_drain_waits_and_refuses() -> None:
    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        short = await engine.submit([_request("a", "abc", max_tokens=5)])
        assert await engine.drain(5)
        assert len([output async for output in short]) == 5
        with pytest.raises(ServerStoppingError):  # it passed the gate before the drain began
            await engine.submit([_request("c", "abc")])
        assert engine.num_live == 0

    _run(body, step_seconds=0.005)


def test_drain_cuts_what_takes_too_long() -> None:
    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        long = await engine.submit([_request("b", "abc", max_tokens=500)])
        assert not await engine.drain(0.05)
        with pytest.raises(ServerStoppingError):
            while True:
                await anext(long)

    _run(body, step_seconds=0.005)


def test_clients_hear_of_a_death_before_the_engine_is_closed() -> None:
    """Closing may have to wait for a compiler."""
    release = threading.Event()

    class SlowToClose(ScriptedEngine):
        def close(self) -> None:
            release.wait(10)
            super().close()

    core = SlowToClose(EngineConfig(max_num_seqs=2, num_pages=32))

    async def main() -> None:
        engine = AsyncEngine(lambda report: core)
        engine.start()
        await engine.loaded.wait()
        started = time.monotonic()
        submission = await engine.submit([_request("a", "CRASH")])
        with pytest.raises(EngineDeadError):
            await anext(submission)
        await asyncio.wait_for(engine.ended.wait(), 5)
        assert time.monotonic() - started < 5 and engine.state is State.DEAD and not core.closed
        release.set()
        await asyncio.to_thread(engine._thread.join, 10)
        assert core.closed and engine.state is State.DEAD

    asyncio.run(main())


def test_a_failing_load_is_reported() -> None:
    async def main() -> None:
        def build(report):
            report("reading", 1, 2)
            raise RuntimeError("no such weights")

        engine = AsyncEngine(build)
        engine.start()
        await asyncio.wait_for(engine.loaded.wait(), 5)
        assert engine.state is State.DEAD and "no such weights" in str(engine.failure)
        assert engine.percent == 12.5

    asyncio.run(main())


class _Stuck(ScriptedEngine):
    """Steps return, but no dispatch finishes until `release` is set."""

    def step(self) -> list[RequestOutput]:
        if self.release.is_set():
            return super().step()
        time.sleep(0.01)
        return []


def test_work_without_a_finished_dispatch_is_a_hang() -> None:
    core = _Stuck(EngineConfig(max_num_seqs=2, num_pages=32))

    async def main() -> None:
        engine = AsyncEngine(lambda report: core, watchdog_seconds=0.3)
        engine.start()
        await engine.loaded.wait()
        await asyncio.sleep(0.5)
        assert engine.healthy  # there is no work
        submission = await engine.submit([_request("a", "abc", max_tokens=5)])
        assert engine.healthy
        await asyncio.sleep(0.5)
        assert not engine.healthy
        core.release.set()
        assert len([output async for output in submission]) == 5 and engine.healthy
        engine.stop()
        await asyncio.wait_for(engine.ended.wait(), 5)

    asyncio.run(main())


class _Compiling(_Stuck):
    """Says that a compiler is at work, as an engine does that holds a request for it."""

    def stats(self) -> EngineStats:
        return dataclasses.replace(super().stats(), num_running=0, is_compiling=not self.release.is_set())


def test_waiting_for_a_compiler_is_no_hang() -> None:
    core = _Compiling(EngineConfig(max_num_seqs=2, num_pages=32))

    async def main() -> None:
        engine = AsyncEngine(lambda report: core, watchdog_seconds=0.3)
        engine.start()
        await engine.loaded.wait()
        submission = await engine.submit([_request("a", "abc", max_tokens=5)])
        await asyncio.sleep(0.8)
        assert engine.healthy
        core.release.set()
        assert len([output async for output in submission]) == 5
        engine.stop()
        await asyncio.wait_for(engine.ended.wait(), 5)

    asyncio.run(main())


def test_a_failure_elsewhere_ends_an_engine_that_is_stuck() -> None:
    """Another process is gone, and this one's devices wait for it."""

    async def body(engine: AsyncEngine, core: ScriptedEngine) -> None:
        submission = await engine.submit([_request("a", "HANG")])
        await asyncio.to_thread(engine.fail, EngineDeadError("process 1 is gone"))
        with pytest.raises(EngineDeadError, match="process 1 is gone"):
            await anext(submission)
        assert engine.state is State.DEAD
        core.release.set()

    assert _run(body).release.is_set()
