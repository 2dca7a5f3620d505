"""What every request passes before a route sees it: an id, the API key, readiness, a bound on its body."""

import contextvars
import dataclasses
import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtp_jax.server.async_engine import AsyncEngine, State
from mtp_jax.server.errors import ApiError, as_api_error, unavailable

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # need no key, and answer in every state
_CLIENT_ID = re.compile(r"[!-~]{1,128}")  # printable, no spaces: safe in a header and in a log line

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")


@dataclasses.dataclass(frozen=True)
class GateOptions:
    api_key: str | None = None
    max_body_bytes: int = 8 * 2**20


class Gate:
    """ASGI middleware. Refuses by 401, 413 and 503; and bugs by 500; sets `request_id` and X-Request-Id."""

    def __init__(self, app: ASGIApp, engine: AsyncEngine, options: GateOptions):
        self._app, self._engine, self._options = app, engine, options

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

        refusal = None if scope["path"] in OPEN_PATHS else self._refusal(headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, self._bounded(receive), send_with_id)
        except Exception as error:
            # Here and not in a handler of the application: those run outside of this middleware.
            if not started:
                await as_api_error(error).response()(scope, receive, send_with_id)
            raise  # uvicorn logs the traceback

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._options.api_key is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            # Bytes, because compare_digest refuses non-ASCII text.
            if (
                not hmac.compare_digest(key.strip().encode("latin-1"), self._options.api_key.encode())
                or scheme.lower() != "bearer"
            ):
                challenge = {"WWW-Authenticate": "Bearer"}
                return ApiError(
                    401, "incorrect or missing API key", code="invalid_api_key", headers=challenge
                )
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
        return None

    def _too_large(self) -> str:
        return f"the body is larger than {self._options.max_body_bytes} bytes"

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, for bodies that do not say their length."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._options.max_body_bytes:
                    raise HTTPException(413, self._too_large())
            return message

        return bounded
