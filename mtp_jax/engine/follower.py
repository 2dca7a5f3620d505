"""The side of every process but 0: it does what process 0 says, in the same order, until that one ends."""

import collections
import concurrent.futures
import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping

import jax

from mtp_jax.engine.buckets import Bucket
from mtp_jax.engine.channel import Channel, ChannelClosedError, Message
from mtp_jax.engine.leader import COMPILED, DESCRIBED, READY, end_process
from mtp_jax.engine.orders import COMPILE, LAUNCH, Launch, read_bucket
from mtp_jax.engine.step import StepOutput
from mtp_jax.errors import InvalidValueError, UnsupportedHereError
from sharding.hosts import JOIN_SECONDS, Cluster

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
COMPILER_THREADS = 2  # as many as process 0 has, or they would wait for each other


class Follower:
    """Process 0, as the others see it.

    Raises:
      InvalidValueError: process 0 is not there in time, or does not want this process.
    """

    def __init__(self, cluster: Cluster, versions: Mapping[str, str], seconds: float = JOIN_SECONDS):
        self.cluster = cluster
        self._agreed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._launches: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._compiler = concurrent.futures.ThreadPoolExecutor(COMPILER_THREADS, "mtp-jax-compile")
        self._compiles: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._channel = _connect(cluster, seconds)
        hello = {
            "process_id": cluster.process_id,
            "num_processes": cluster.num_processes,
            "versions": dict(versions),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            self._channel.send(Message("hello", hello))
            answer = self._channel.receive()
        except ChannelClosedError:
            self._channel.close()
            legal = "process 0 there, waiting for this one; it has closed the connection"
            raise InvalidValueError("--coordinator", cluster.coordinator, legal) from None
        if answer.kind != "go":
            self._channel.close()
        if answer.kind == "failed":
            raise UnsupportedHereError(answer.text("text"))
        if answer.kind != "go":
            reason = answer.text("text")
            raise InvalidValueError("--process-id", cluster.process_id, f"what process 0 wants: {reason}")
        threading.Thread(target=self._listen, name="mtp-jax-leader", daemon=True).start()

    def agree(self, description: Mapping[str, object], num_pages: int) -> int:
        """See `Leader.agree`, which also finds what differs."""
        self._channel.send(Message(DESCRIBED, {"description": description, "num_pages": num_pages}))
        return self._agreed.get()

    def compile_with(self, compile_bucket: Callable[[Bucket], object]) -> None:
        """From now on compiles what process 0 compiles, in threads of their own."""

        def answer(order: Message) -> None:
            error = ""
            try:
                compile_bucket(read_bucket(order))
            except Exception as raised:
                log.exception("could not compile")
                error = " ".join(f"{type(raised).__name__}: {raised}".split())
            with contextlib.suppress(ChannelClosedError):  # `_listen` finds out by itself
                self._channel.send(Message(COMPILED, {**order.fields, "error": error}))

        def pass_on() -> None:
            while True:
                self._compiler.submit(answer, self._compiles.get())

        threading.Thread(target=pass_on, name="mtp-jax-compile", daemon=True).start()

    def wait_ready(self) -> None:
        """Says that this process has its weights; nobody here needs to wait for the others."""
        self._channel.send(Message(READY))

    def serve(self, launch: Callable[[Launch], StepOutput]) -> None:
        """Launches what process 0 launches, until that ends in good order."""
        running: collections.deque[StepOutput] = collections.deque()
        while (message := self._launches.get()).kind == LAUNCH:
            running.append(launch(Launch.decode(message)))
            if len(running) > 1:  # an error of the device must not stay where nobody looks
                jax.block_until_ready(running.popleft())
        jax.block_until_ready(tuple(running))
        self._compiler.shutdown()

    def ask_to_stop(self, text: str) -> None:
        """Has process 0 end everything in good order."""
        self._channel.send(Message("stop", {"text": text}))

    def fail(self, text: str) -> None:
        """Has process 0 end everything at once."""
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(Message("failed", {"text": text}))

    def _listen(self) -> None:
        ended = False
        try:
            while True:
                message = self._channel.receive()
                if message.kind == COMPILE:
                    self._compiles.put(message)
                elif message.kind == "agreed":
                    self._agreed.put(message.number("num_pages"))
                elif message.kind == "failed":
                    end_process(f"{message.text('text')}; stopping", message.number("code"))
                else:
                    ended |= message.kind == "end"
                    self._launches.put(message)
        except ChannelClosedError:
            self._channel.close()
            if not ended:
                end_process(f"process 0 ({self.cluster.coordinator}) is gone; stopping")


def _connect(cluster: Cluster, seconds: float) -> Channel:
    deadline = time.monotonic() + seconds
    while True:
        try:
            address = (cluster.host, cluster.plan_port)
            connection = socket.create_connection(address, timeout=max(1.0, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or str(error)
                where = f"the address of process 0, which listens on {cluster.plan_port} too"
                legal = f"{where}, within {seconds:g} s ({reason})"
                raise InvalidValueError("--coordinator", cluster.coordinator, legal) from None
            time.sleep(RETRY_SECONDS)
        else:
            connection.settimeout(None)
            return Channel(connection)
