"""The web application: routes, errors and middleware around one AsyncEngine."""

import hashlib
import time
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from mtp_jax.server.async_engine import AsyncEngine
from mtp_jax.server.errors import install_error_handlers
from mtp_jax.server.metrics import ServerMetrics
from mtp_jax.server.middleware import Gate, GateOptions
from mtp_jax.server.routes_anthropic import anthropic_routes
from mtp_jax.server.routes_openai import openai_routes
from mtp_jax.server.routes_responses import responses_routes
from mtp_jax.server.routes_service import service_routes
from mtp_jax.server.turns import ParserOptions


def create_app(
    engine: AsyncEngine,
    metrics: ServerMetrics,
    options: GateOptions,
    version: str,
    identity: str,
    parsers: ParserOptions = ParserOptions(),  # noqa: B008 - frozen
    spec_metrics: str = "none",
) -> FastAPI:
    """Builds the application.

    Args:
      version: of this package.
      identity: text that changes whenever the served model or its settings do; hashed into
        `system_fingerprint`.
      parsers: of reasoning and tool calls.
      spec_metrics: what every answer says of its speculation: none, summary or detailed.
    """
    fingerprint = "fp_" + hashlib.sha256(f"{version}|{identity}".encode()).hexdigest()[:12]
    app = FastAPI(title="mtp-jax", version=version, redirect_slashes=False)
    install_error_handlers(app)
    app.include_router(openai_routes(engine, fingerprint, int(time.time()), parsers, spec_metrics))
    app.include_router(anthropic_routes(engine, parsers))
    app.include_router(responses_routes(engine, parsers))
    app.include_router(service_routes(engine, metrics))
    app.add_middleware(Gate, engine=engine, options=options)
    return app


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Lets pages of these origins call from a browser; their preflight requests need no key."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
