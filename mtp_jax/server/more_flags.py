"""Flags of the server that no other program has: limits, and what answers look like."""

from mtp_jax.server.readers import Flag, any_text, number
from mtp_jax.text.turn.choose import REASONING_PARSERS, TOOL_CALL_PARSERS

ANSWER_FLAGS: dict[str, Flag] = {
    "chat_template": ("file with a Jinja template to use instead of the model's", any_text, None),
    "reasoning_parser": (
        "how reasoning is told from the answer; auto goes by the model",
        any_text,
        ("auto", "none", *REASONING_PARSERS),
    ),
    "tool_call_parser": (
        "how the model writes tool calls; auto goes by its chat template",
        any_text,
        ("auto", "none", *TOOL_CALL_PARSERS),
    ),
    "per_request_spec_decode_metrics": (
        "add to every answer what speculation did for it; detailed lists each round",
        any_text,
        ("none", "summary", "detailed"),
    ),
    "otlp_traces_endpoint": (
        "collector (OTLP over HTTP) that gets a trace of each request; needs the extra otel",
        any_text,
        None,
    ),
}

HOST_FLAGS: dict[str, Flag] = {
    "coordinator": (
        "HOST:PORT of process 0, for a model on several hosts; this port and the next must be free there. "
        "Cloud TPU, SLURM and Kubernetes tell by themselves",
        any_text,
        None,
    ),
    "num_processes": (
        "processes that serve together, all with the same flags; 1 is this one alone",
        number(int, 1),
        None,
    ),
    "process_id": ("which of them this is, from 0; process 0 has HTTP and scheduler", number(int, 0), None),
}

LIMIT_FLAGS: dict[str, Flag] = {
    "max_body_mib": ("largest request body, in MiB", number(float, 0.001), None),
    "max_header_kib": ("largest head of a request, in KiB", number(float, 1), None),
    "max_json_depth": ("deepest nesting of a request's JSON", number(int, 4, 512), None),
    "max_queued_requests": (
        "completions that wait for a slot; beyond them 429 with Retry-After",
        number(int, 0),
        None,
    ),
    "request_timeout": ("seconds for one request, waiting included; 0 is no limit", number(float, 0), None),
    "client_timeout": (
        "seconds that a client has to send a request, or to go on reading its answer",
        number(float, 0.1),
        None,
    ),
}
