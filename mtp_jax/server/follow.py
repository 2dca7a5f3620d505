"""The life of a server's other processes: no HTTP, only a part of the engine that process 0 drives."""

import logging
import os
import signal
import sys
import threading
from types import FrameType

from mtp_jax.engine.follower import Follower
from mtp_jax.engine.hosts import follow
from mtp_jax.errors import InvalidValueError, UnsupportedHereError
from mtp_jax.server.arguments import ServeOptions, fail
from mtp_jax.server.backend import engine_options, prepare
from mtp_jax.server.signals import exit_on_signals
from sharding.hosts import Cluster

log = logging.getLogger(__name__)


class FollowerProcess:
    """One process that is not process 0. A first SIGTERM or Ctrl-C asks process 0 to end all of them."""

    def __init__(self, options: ServeOptions, cluster: Cluster, prog: str):
        self.options, self.cluster, self.prog = options, cluster, prog
        self._follower: Follower | None = None
        self._asked = False
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def run(self) -> int:
        """Follows until process 0 ends; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        log.info("process %d of %d: process 0 at %s has HTTP and scheduler", *self._place())
        # In a thread of its own: signals only reach a main thread that waits in Python.
        threading.Thread(target=self._work, name="engine", daemon=True).start()
        self._ended.wait()
        if self._failure is None:
            log.info("process 0 has ended: stopped")
            exit_on_signals()
            return 0
        code = 1
        if isinstance(self._failure, InvalidValueError | UnsupportedHereError):
            code = fail(self.prog, self._failure)
        else:
            log.critical("process %d of %d failed", *self._place()[:2], exc_info=self._failure)
        sys.stderr.flush()
        os._exit(code)  # devices and compilers may be waiting for processes that end, too

    def _place(self) -> tuple[int, int, str]:
        return self.cluster.process_id, self.cluster.num_processes, self.cluster.coordinator

    def _work(self) -> None:
        try:
            prepare(self.options, self.cluster)
            follow(self.cluster, engine_options(self.options), self._joined, self.options.check)
        except BaseException as error:
            self._failure = error
        self._ended.set()

    def _joined(self, follower: Follower) -> None:
        self._follower = follower

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._follower is None or self._asked:
            os._exit(128 + number)
        self._asked = True
        name = signal.Signals(number).name
        log.info("%s: asking process 0 to drain and to end all processes", name)
        # Not here: the main thread may be interrupted anywhere, and a send may have to wait.
        told = f"was told to stop ({name})"
        threading.Thread(target=self._follower.ask_to_stop, args=(told,), daemon=True).start()
