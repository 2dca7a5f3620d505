"""Answers that stop working as soon as their client is gone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone away; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected[T](receive: Receive, work: Coroutine[None, None, T]) -> T | None:
    """The result of `work`, which is cancelled if the client leaves first; None then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, watcher)


class EventStream(Response):
    """Server-sent events. `on_close` runs exactly once, however the answer ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]):
        self._events, self._on_close = events, on_close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _cancel(pump, watcher)
            self._on_close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await asyncio.sleep(0)  # neither a full queue nor a fast socket yields: let a disconnect be seen
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cancel(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
