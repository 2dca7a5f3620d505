"""Messages between the processes of one engine, over TCP: a kind, some plain fields, some arrays.

No pickles: whoever reaches the port can disturb a launch, but not run code in it.
"""

import contextlib
import dataclasses
import json
import math
import socket
import struct
import threading
from collections.abc import Mapping

import numpy as np

_LENGTH = struct.Struct(">I")
MAX_HEADER_BYTES = 2**22
LOST_SECONDS = 8  # without a sign of the other host's kernel, it is lost


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


@dataclasses.dataclass(frozen=True)
class Message:
    """`fields` are what JSON can hold; `arrays` travel as bytes."""

    kind: str
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def text(self, field: str) -> str:
        """A field that is a text."""
        return str(self.fields.get(field, ""))

    def number(self, field: str) -> int:
        """A field that is an integer. Raises ChannelClosedError where it is none: this is not one of us."""
        value = self.fields.get(field)
        if not isinstance(value, int):
            raise ChannelClosedError(f"{self.kind}: no number {field!r}")
        return value

    def encode(self) -> bytes:
        layout = [[name, array.dtype.str, array.shape] for name, array in self.arrays.items()]
        header = json.dumps({"kind": self.kind, "fields": self.fields, "arrays": layout}).encode()
        bodies = (np.ascontiguousarray(array).tobytes() for array in self.arrays.values())
        return b"".join((_LENGTH.pack(len(header)), header, *bodies))


class Channel:
    """One connection. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A process that dies closes its sockets; of a host that dies only the silence tells.
        options = {
            "TCP_KEEPIDLE": 2,
            "TCP_KEEPINTVL": 2,
            "TCP_KEEPCNT": (LOST_SECONDS - 2) // 2,
            "TCP_USER_TIMEOUT": LOST_SECONDS * 1000,  # milliseconds
        }
        for name, value in options.items():
            if hasattr(socket, name):  # not everywhere; JAX's heartbeat remains
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        """Raises ChannelClosedError."""
        data = message.encode()
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises ChannelClosedError, also where none comes in time or it is none."""
        try:
            if timeout is not None:
                self._socket.settimeout(timeout)
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > MAX_HEADER_BYTES:
                raise ChannelClosedError(f"a header of {length} bytes")
            header = json.loads(self._exactly(length))
            arrays = {name: self._array(dtype, tuple(shape)) for name, dtype, shape in header["arrays"]}
            message = Message(header["kind"], dict(header["fields"]), arrays)
            if timeout is not None:
                self._socket.settimeout(None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ChannelClosedError(str(error)) from error
        return message

    def _array(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        kind = np.dtype(dtype)
        data = self._exactly(math.prod(shape) * kind.itemsize)
        return np.frombuffer(data, kind).reshape(shape)

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            got = self._socket.recv_into(view)
            if not got:
                raise ChannelClosedError("the connection was closed")
            view = view[got:]
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
