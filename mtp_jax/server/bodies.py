"""Bodies of requests as JSON, with a bound on how deeply they nest."""

import re
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


class TooDeepError(HTTPException):
    """A body that nests too deeply."""

    code = "json_too_deep"


def json_depth(text: bytes) -> int:
    """How deeply arrays and objects nest, brackets inside of strings left out; 0 for a plain value.

    For text that is no JSON it is what a parser could meet before it notices.
    """
    brackets = np.frombuffer(_STRING.sub(b"", text).translate(None, _NOT_BRACKETS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    return int(np.cumsum(steps).max(initial=0))


class _BoundedRequest(Request):
    async def json(self) -> Any:
        limit: int = self.app.state.max_json_depth
        depth = json_depth(await self.body())
        if depth > limit:
            raise TooDeepError(400, f"the body nests {depth} deep; expected at most {limit}")
        return await super().json()


class BoundedRoute(APIRoute):
    """A route whose body may nest `app.state.max_json_depth` deep."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handler(_BoundedRequest(request.scope, request.receive))

        return bounded
