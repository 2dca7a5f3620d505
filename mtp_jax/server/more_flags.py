"""Flags of the server that no other program has: limits, and what answers look like."""

from mtp_jax.server.readers import Flag, number

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
