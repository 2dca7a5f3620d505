"""Why a request ends without being answered in full, besides the caller's mistakes and the engine's death."""


class ServerStoppingError(RuntimeError):
    """The server is draining: the request was not admitted, or was cut short when the time was over."""


class OverloadedError(RuntimeError):
    """Too many requests wait already."""


class RequestTimeoutError(RuntimeError):
    """The request took longer than the server allows."""


class SlowClientError(RuntimeError):
    """The client reads its answer so slowly that too much of it waits here."""
