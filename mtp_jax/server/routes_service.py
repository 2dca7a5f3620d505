"""What operators ask: /health, /ready, /metrics; and vLLM's /tokenize and /detokenize."""

import asyncio

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.responses import Response

from mtp_jax.server.async_engine import AsyncEngine, State
from mtp_jax.server.bodies import BoundedRoute
from mtp_jax.server.errors import RETRY_SECONDS, ApiError
from mtp_jax.server.interface import EngineCore
from mtp_jax.server.metrics import CONTENT_TYPE, ServerMetrics
from mtp_jax.server.prompts import check_model, check_token_ids, encode, render_chat
from mtp_jax.server.protocol import DetokenizeBody, TokenizeBody

MAX_CONTEXTS = 4  # tokens of one call that are turned into text, in context lengths


def _check_count(engine: EngineCore, count: int, param: str) -> None:
    limit = MAX_CONTEXTS * engine.config.max_model_len
    if count > limit:
        message = f"{param}: got {count} tokens; expected at most {limit}, {MAX_CONTEXTS} context lengths"
        raise ApiError(400, message, param, "invalid_value")


async def _decode(engine: EngineCore, sequences: list[list[int]]) -> list[str]:
    """Texts with special tokens written out, decoded off the event loop."""
    return await asyncio.to_thread(engine.tokenizer.decode_batch, sequences, skip_special_tokens=False)


def service_routes(engine: AsyncEngine, metrics: ServerMetrics) -> APIRouter:
    router = APIRouter(route_class=BoundedRoute)

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while alive, loading included; 503 when the engine is dead or hangs in a step."""
        if engine.healthy:
            return JSONResponse({"status": "ok"})
        reason = (
            repr(engine.failure)
            if engine.state is State.DEAD
            else "a step takes longer than the watchdog allows"
        )
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """200 when requests are served; 503 with the percentage until then, and while draining."""
        if engine.state is State.READY and not engine.draining:
            return JSONResponse({"status": "ready", "percent": 100.0})
        status = "draining" if engine.draining else engine.state.value
        answer = {"status": status, "percent": round(engine.percent, 1), "phase": engine.phase}
        return JSONResponse(answer, 503, headers={"Retry-After": str(RETRY_SECONDS)})

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict:
        core = engine.engine
        check_model(core, body.model)
        if body.messages is not None:
            tools = [tool.as_template_tool() for tool in body.tools or ()] or None
            text, _ = await render_chat(core, body.messages, body, tools)
        else:
            text = body.prompt or ""
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        param = "prompt" if body.messages is None else "messages"
        (ids,) = await encode(core, [text], special, param)
        pieces = None
        if body.return_token_strs:
            _check_count(core, len(ids), "return_token_strs")
            pieces = await _decode(core, [[token] for token in ids])
        return {
            "count": len(ids),
            "max_model_len": core.config.max_model_len,
            "tokens": ids,
            "token_strs": pieces,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict:
        core = engine.engine
        check_model(core, body.model)
        _check_count(core, len(body.tokens), "tokens")
        check_token_ids(core, body.tokens, "tokens")
        (text,) = await _decode(core, [body.tokens])
        return {"prompt": text}

    return router
