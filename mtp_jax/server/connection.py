"""Connections whose clients cannot keep them for ever: uvicorn's HTTP/1.1 protocol with deadlines."""

import asyncio
import http
import logging
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtp_jax.server.errors import ApiError

log = logging.getLogger(__name__)


class PatientProtocol(H11Protocol):
    """Ends a connection whose client takes too long to send a request's head, or stops reading.

    uvicorn suspends an answer while more than 64 KiB of it are unread; here that may last `patience`
    seconds. The request is then aborted as if the client had gone.
    """

    patience = 60.0  # seconds; see `patient_protocol`
    _head_due: asyncio.TimerHandle | None = None
    _read_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._head_due = self.loop.call_later(self.patience, self._give_up, "no request came")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        idle = self.conn.their_state is h11.IDLE  # so what has come is part of a head
        if idle and self._head_due is None:
            self._head_due = self.loop.call_later(self.patience, self._give_up, "half a request came")
        elif not idle and self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_due is not None:
            self._read_due.cancel()
            self._read_due = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # closing waits for the rest to be read
            self._watch_reading()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reading()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._watch_reading()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has too long a head, in OpenAI's shape."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        code = "header_too_large" if status == 431 else None
        answer = ApiError(status, "the head is too large" if status == 431 else msg, code=code).response()
        headers = [*answer.raw_headers, (b"connection", b"close")]
        reason = http.HTTPStatus(status).phrase.encode()
        for event in (
            h11.Response(status_code=status, headers=headers, reason=reason),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._watch_reading()

    def _watch_reading(self) -> None:
        if self._read_due is None:
            self._read_due = self.loop.call_later(self.patience, self._give_up, "nothing was read")

    def _give_up(self, why: str) -> None:
        if self.client is not None:
            log.info("closing the connection of %s:%d: %s for %g s", *self.client, why, self.patience)
        self.transport.abort()

    def _cancel(self) -> None:
        for timer in (self._head_due, self._read_due):
            if timer is not None:
                timer.cancel()


def patient_protocol(seconds: float) -> type[PatientProtocol]:
    """A protocol class, for uvicorn's `http`, with a patience of so many seconds."""
    return type("PatientProtocol", (PatientProtocol,), {"patience": seconds})
