"""What the operator sees on stderr: log lines, loading progress, the ready line."""

import json
import logging
import shlex
import sys
import time

from mtp_jax.progress import PhaseBars
from mtp_jax.server.middleware import request_id

log = logging.getLogger("mtp_jax")


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get() != "-":
            entry["request_id"] = request_id.get()
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(level: str, form: str) -> None:
    """Logs of the whole process go to stderr, as text or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    log.setLevel(level.upper())


class Progress:
    """Shows loading: a bar for each phase, or a log line for each where logs are structured."""

    def __init__(self, structured: bool):
        self._structured = structured
        self._bars = PhaseBars()
        self._phase = ""
        self._started = time.monotonic()

    def __call__(self, phase: str, done: float, total: float) -> None:
        if not self._structured:
            self._bars(phase, done, total)
        elif phase != self._phase:
            self._phase = phase
            log.info("%s", phase)

    def close(self) -> None:
        self._bars.close()

    @property
    def seconds(self) -> float:
        """Since loading began."""
        return time.monotonic() - self._started


def curl_line(address: str, chat: bool, needs_key: bool) -> str:
    """A command that works as it stands (with the key in $API_KEY where there is one)."""
    path, body = (
        "/v1/completions",
        '{"model": "default", "prompt": "The capital of France is", "max_tokens": 40}',
    )
    if chat:
        path = "/v1/chat/completions"
        messages = '[{"role": "user", "content": "What is the capital of France?"}]'
        body = f'{{"model": "default", "messages": {messages}, "max_tokens": 40}}'
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    return f"curl {address}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
