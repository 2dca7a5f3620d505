"""Errors that callers can tell apart.

Two families. `InvalidValueError` (a `ValueError`) is the caller's mistake: it names the flag or
field, what it got and what is legal. `UnsupportedHereError` (a `NotImplementedError`) means this
back end or build cannot do what was asked although another could.
"""


class InvalidValueError(ValueError):
    """A flag, field or parameter has a value that cannot be used.

    Attributes:
      field: the name the caller knows it by: `--page-size`, `temperature`, `config.json: hidden_size`.
      got: the offending value.
      legal: what would be accepted, in words.
    """

    def __init__(self, field: str, got: object, legal: str):
        self.field, self.got, self.legal = field, got, legal
        super().__init__(f"{field}: got {got!r}; expected {legal}")


class InvalidRequestError(InvalidValueError):
    """A request that this server can never serve; HTTP 400 with `field` as the parameter."""


class CheckpointError(InvalidValueError):
    """A model directory or file that cannot be loaded: `field` names the file or tensor."""


class UnsupportedHereError(NotImplementedError):
    """This back end or build cannot do it; another could."""


class NotCompiledError(RuntimeError):
    """A step that a request needs could not be compiled; the log says why."""


class EngineDeadError(RuntimeError):
    """The engine stopped on an internal error; nothing further will be answered."""
