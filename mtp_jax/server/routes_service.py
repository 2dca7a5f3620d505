"""What operators ask: /health, /ready, /metrics; and vLLM's /tokenize and /detokenize."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.responses import Response

from mtp_jax.server.async_engine import AsyncEngine, State
from mtp_jax.server.errors import RETRY_SECONDS
from mtp_jax.server.metrics import CONTENT_TYPE, ServerMetrics
from mtp_jax.server.prompts import check_model, check_token_ids, encode, render_chat
from mtp_jax.server.protocol import DetokenizeBody, TokenizeBody


def service_routes(engine: AsyncEngine, metrics: ServerMetrics) -> APIRouter:
    router = APIRouter()

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
            text = render_chat(core, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
        else:
            text = body.prompt or ""
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        ids = await encode(core, text, special, "prompt" if body.messages is None else "messages")
        pieces = None
        if body.return_token_strs:
            pieces = [core.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
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
        check_token_ids(core, body.tokens, "tokens")
        return {"prompt": core.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return router
