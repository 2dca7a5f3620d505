"""Errors as OpenAI's API words them: {"error": {"message", "type", "param", "code"}}; or Anthropic's."""

import http
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mtp_jax.errors import EngineDeadError, InvalidValueError, NotCompiledError
from mtp_jax.server.refusals import (
    OverloadedError,
    RequestTimeoutError,
    ServerStoppingError,
    SlowClientError,
)

RETRY_SECONDS = 5  # what Retry-After suggests while loading or draining

ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Names that pydantic puts into the location of an error for the branch of a union; no field of ours.
_TYPE_NAMES = {"str", "int", "float", "bool", "none", "dict", "list"}


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 404 and self.code == "model_not_found":
            kind = "not_found_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, object]:
        """The same in Anthropic's shape."""
        kind = _ANTHROPIC_TYPES.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> Response:
        """The HTTP response; `path` of the request decides whose API words it."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        # ASCII, because the message may quote half a surrogate pair that UTF-8 cannot carry.
        return Response(json.dumps(body), self.status, self.headers, "application/json")


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def overloaded(reason: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return ApiError(429, f"the server is busy: {reason}; try again later", None, "server_overloaded", headers)


def as_api_error(error: BaseException) -> ApiError:
    """The answer for any error that a request can end in."""
    match error:
        case ApiError():
            return error
        case InvalidValueError():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_dead")
        case ServerStoppingError():
            return unavailable(str(error), "server_stopping")
        case OverloadedError():
            return overloaded(str(error))
        case RequestTimeoutError():
            return ApiError(408, str(error), code="request_timeout")
        case NotCompiledError():
            return ApiError(500, str(error), code="not_compiled")
        case SlowClientError():
            return ApiError(408, str(error), code="client_too_slow")
        case _:
            return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def _parameter(location: Sequence[int | str]) -> str | None:
    """('body', 'messages', 0, 'content') -> 'messages[0].content'."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in _TYPE_NAMES and part.isidentifier():
            name += f".{part}" if name else part
    return name or None


def _most_telling(errors: Sequence[Any]) -> Any:
    """The first error, or, if it is one branch of a union, the branch that got furthest."""
    first = errors[0]
    if first["loc"][-1] not in _TYPE_NAMES:
        return first
    prefix = first["loc"][:-1]
    return max((item for item in errors if item["loc"][: len(prefix)] == prefix), key=lambda e: len(e["loc"]))


def _from_validation(error: RequestValidationError, request: Request) -> ApiError:
    errors: Sequence[Any] = error.errors()
    first = _most_telling(errors)
    location = first["loc"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {location[-1]}")
    if len(location) == 1 and location[0] == "body":
        if "json" not in request.headers.get("content-type", ""):
            return ApiError(400, "Content-Type: expected application/json", param="Content-Type")
        about_fields = first["type"] == "invalid"  # ours, about several fields together
        return ApiError(400, first["msg"] if about_fields else "the body must be a JSON object")
    param = _parameter(location)
    if first["type"] == "extra_forbidden":
        unknown = [
            _parameter(item["loc"]) or str(item["loc"][-1])
            for item in errors
            if item["type"] == first["type"]
        ]
        message = f"unrecognized request argument: {', '.join(unknown)}"
        return ApiError(400, message, param=param or str(location[-1]), code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: a required parameter is missing", param, "missing_required_parameter")
    code = "unsupported_parameter" if first["type"] == "unsupported" else "invalid_value"
    return ApiError(400, f"{param}: {first['msg']}", param=param, code=code)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of `app` come out in OpenAI's shape; bugs are the `Gate`'s to answer."""

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> Response:
        return _from_validation(error, request).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        if detail == http.HTTPStatus(error.status_code).phrase:  # Starlette's own 404 and 405
            detail = f"{request.method} {request.url.path}: {detail}"
        # The gate's own, and what a subclass says.
        codes = {413: "body_too_large", 408: "request_timeout"}
        code = getattr(error, "code", codes.get(error.status_code))
        answer = ApiError(error.status_code, detail, code=code, headers=dict(error.headers or {}))
        return answer.response(request.url.path)

    async def _known(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    known = (ApiError, InvalidValueError, EngineDeadError, ServerStoppingError, OverloadedError)
    for kind in (*known, RequestTimeoutError, SlowClientError, NotCompiledError):
        app.add_exception_handler(kind, _known)
