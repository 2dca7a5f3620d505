"""The engine's fields on a benchmark's command line: `--set FIELD=VALUE`."""


def setting(text: str) -> tuple[str, int | str]:
    """A field of EngineConfig and its value.

    >>> setting("prefill-chunk=64")
    ('prefill_chunk', 64)
    """
    name, _, value = text.partition("=")
    return name.replace("-", "_"), int(value) if value.lstrip("-").isdigit() else value
