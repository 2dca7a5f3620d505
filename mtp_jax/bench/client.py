"""A client of any OpenAI-compatible server that times what it streams."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from mtp_jax.bench.acceptance import Scrape, from_metrics
from mtp_jax.bench.prompts import Prompt
from mtp_jax.bench.records import Record

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_MAX_REASON = 200  # characters of a server's words in a failure


class ServerError(Exception):
    """The server did not do what it was asked; the text says what it did."""


class ApiClient:
    """Requests to one server, each over a connection of its own where they overlap.

    Args:
      url: the server's address, with or without /v1.
      timeout: seconds that a whole answer may take.
    """

    def __init__(self, url: str, endpoint: str, api_key: str | None, timeout: float):
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=None,  # answers have a limit of their own
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._endpoint, self._timeout = endpoint, timeout

    async def __aenter__(self) -> "ApiClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """The name of the first model that is served. Raises ServerError."""
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._http.get("/v1/models")
        except (httpx.HTTPError, TimeoutError) as error:
            raise ServerError(describe(error)) from None
        if answer.status_code != 200:
            raise ServerError(_refusal(answer.status_code, answer.content))
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError("/v1/models names no model") from None

    async def scrape(self) -> Scrape | None:
        """Its metrics; None where it has none."""
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._http.get("/metrics")
            return from_metrics(answer.text) if answer.status_code == 200 else None
        except (httpx.HTTPError, TimeoutError, ValueError):
            return None

    async def complete(self, prompt: Prompt, parameters: dict[str, Any]) -> Record:
        """Sends one request and reads its stream; failures are in the record.

        Args:
          parameters: of the body, besides the prompt, max_tokens and what makes it a stream.
        """
        content = (
            {"messages": prompt.as_messages()} if self._endpoint == "chat" else {"prompt": prompt.content}
        )
        body = {**content, "max_tokens": prompt.max_tokens, **parameters}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        stream = _Stream(time.perf_counter())
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._http.stream("POST", PATHS[self._endpoint], json=body) as answer,
            ):
                if answer.status_code != 200:
                    raise ServerError(_refusal(answer.status_code, await answer.aread()))
                async for now, data in _events(answer):
                    stream.saw(now, data)
            stream.check()
        except TimeoutError:
            return stream.failed(f"no end within {self._timeout:g} s")
        except (ServerError, httpx.HTTPError) as error:
            return stream.failed(describe(error))
        return stream.record()


class _Stream:
    """One answer as it comes."""

    def __init__(self, sent: float):
        self._sent = sent
        self._ended: float | None = None
        self._chunks: list[float] = []
        self._usage: dict[str, Any] | None = None
        self._done = False

    def saw(self, now: float, data: bytes) -> None:
        """Takes an event. Raises ServerError for one that is none of OpenAI's."""
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = json.loads(data)
            choices = chunk.get("choices") or ()
            error = chunk.get("error")
        except (ValueError, AttributeError):
            raise ServerError(f"an event that is no JSON object: {_short(data)}") from None
        if error:
            message = error.get("message", error) if isinstance(error, dict) else error
            raise ServerError(f"error in the stream: {_short(str(message))}")
        if choices:
            self._ended = now
            if _has_text(choices[0]):
                self._chunks.append(now)
        self._usage = chunk.get("usage") or self._usage

    def check(self) -> None:
        """Raises ServerError unless the answer is whole."""
        if not self._done:
            raise ServerError("the stream ended without [DONE]")
        if self._ended is None:
            raise ServerError("the stream had no choices")

    def record(self) -> Record:
        usage = self._usage or {}
        return Record(
            sent=self._sent,
            ended=self._ended or self._sent,
            chunks=tuple(self._chunks),
            num_prompt_tokens=usage.get("prompt_tokens") or 0,
            num_output_tokens=usage.get("completion_tokens", len(self._chunks)),
            has_usage="completion_tokens" in usage,
        )

    def failed(self, reason: str) -> Record:
        return Record(self._sent, time.perf_counter(), tuple(self._chunks), error=reason)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """The data of server-sent events, and when they came."""
    rest = b""
    async for piece in answer.aiter_bytes():
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[len(b"data:") :].strip()


def describe(error: Exception) -> str:
    """A failure in words, the same for all that failed in the same way."""
    if isinstance(error, ServerError):
        return str(error)
    if isinstance(error, httpx.ConnectError):
        return f"cannot connect: {error}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}"


def _refusal(status: int, content: bytes) -> str:
    """HTTP 400: what the server said."""
    try:
        found = json.loads(content)
        found = found.get("error", found)
        words = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        words = content.decode(errors="replace")
    return f"HTTP {status}: {_short(str(words))}"


def _short(text: str | bytes) -> str:
    plain = " ".join((text.decode(errors="replace") if isinstance(text, bytes) else text).split())
    return plain if len(plain) <= _MAX_REASON else plain[:_MAX_REASON] + "..."
