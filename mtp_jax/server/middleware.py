"""What every request passes before a route sees it: an id, the API key, readiness, bounds on its size."""

import asyncio
import contextvars
import dataclasses
import hashlib
import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtp_jax.server.async_engine import AsyncEngine, State
from mtp_jax.server.errors import ApiError, as_api_error, overloaded, unavailable

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # need no key, and answer in every state
_CLIENT_ID = re.compile(r"[!-~]{1,128}")  # printable, no spaces: safe in a header and in a log line

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")


@dataclasses.dataclass(frozen=True)
class GateOptions:
    api_key: str | None = None
    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 32 * 2**10
    body_seconds: float = 60.0  # for the whole body to arrive


class Gate:
    """ASGI middleware. Refuses by 401, 408, 413, 429, 431 and 503; and bugs by 500.

    It sets `request_id` and X-Request-Id.
    """

    def __init__(self, app: ASGIApp, engine: AsyncEngine, options: GateOptions):
        self._app, self._engine, self._options = app, engine, options
        self._key = None if options.api_key is None else _digest(options.api_key.encode())
        self._num_calls = 0  # inside the application; those of OPEN_PATHS are not counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _CLIENT_ID.fullmatch(given) else uuid.uuid4().hex
        request_id.set(name)

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
                started = True
            await send(message)

        is_open = scope["path"] in OPEN_PATHS
        refusal = self._too_large_head(headers) if is_open else self._refusal(headers)
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send_with_id)
            return
        self._num_calls += not is_open
        try:
            await self._app(scope, self._bounded(receive), send_with_id)
        except Exception as error:
            # Here and not in a handler of the application: those run outside of this middleware.
            if not started:
                await as_api_error(error).response(scope["path"])(scope, receive, send_with_id)
            raise  # uvicorn logs the traceback
        finally:
            self._num_calls -= not is_open

    def _too_large_head(self, headers: Headers) -> ApiError | None:
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if size <= self._options.max_header_bytes:
            return None
        message = f"the head has {size} bytes; expected at most {self._options.max_header_bytes}"
        return ApiError(431, message, code="header_too_large")

    def _has_key(self, headers: Headers) -> bool:
        """Whether the key was sent, as a bearer's or in Anthropic's header."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key", "") if scheme.lower() != "bearer" else bearer.strip()
        # Digests, so that neither the key's length nor its beginning shows in the time.
        return self._key is None or hmac.compare_digest(_digest(given.encode("latin-1")), self._key)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if (too_large := self._too_large_head(headers)) is not None:
            return too_large
        if not self._has_key(headers):
            challenge = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, "incorrect or missing API key", code="invalid_api_key", headers=challenge)
        engine = self._engine
        if engine.state is State.LOADING:
            return unavailable(f"the model is loading ({engine.percent:.0f} %)", "not_ready")
        if engine.state is not State.READY:
            return ApiError(503, f"the engine is {engine.state.value}", code="engine_dead")
        if engine.draining:
            return unavailable("the server is shutting down", "server_stopping")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._options.max_body_bytes:
            return ApiError(413, self._too_large(), code="body_too_large")
        if self._num_calls >= engine.capacity:
            return overloaded(f"{self._num_calls} calls are being answered")
        return None

    def _too_large(self) -> str:
        return f"the body is larger than {self._options.max_body_bytes} bytes"

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, for bodies that do not say their length or take too long."""
        seen, complete = 0, False
        due = asyncio.get_running_loop().time() + self._options.body_seconds

        async def bounded() -> Message:
            nonlocal seen, complete
            try:
                async with asyncio.timeout_at(None if complete else due):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {self._options.body_seconds:g} s"
                raise HTTPException(408, text, {"Connection": "close"}) from None
            if message["type"] == "http.request":
                complete = not message.get("more_body", False)
                seen += len(message.get("body", b""))
                if seen > self._options.max_body_bytes:
                    raise HTTPException(413, self._too_large())
            return message

        return bounded


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
