"""Process 0's side of an engine on several hosts: it tells the others what to run, and hears how they are.

Plans travel beside the devices, over TCP: a device collective would wait behind the program that runs (1 s
where this takes milliseconds). Every process then launches the same programs in the same order.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping

from mtp_jax.engine.buckets import Bucket
from mtp_jax.engine.channel import Channel, ChannelClosedError, Message
from mtp_jax.engine.orders import Launch, compile_order, read_bucket
from mtp_jax.errors import InvalidValueError
from sharding.hosts import JOIN_SECONDS, Cluster

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0  # that somebody who connects has to say who he is
REMIND_SECONDS = 15.0  # between two lines about who is missing
# Devices notice a process that dies, too, and may be faster: but only its connection says which one it was.
CULPRIT_SECONDS = 0.5
COMPILED, DESCRIBED, READY = "compiled", "described", "ready"  # answers that somebody waits for

Told = Callable[[str], None]


def end_process(text: str, code: int = 1) -> None:
    """Ends this process at once, whatever its threads and devices are waiting for."""
    say(text)
    os._exit(code)


def say(text: str) -> None:
    """A line on stderr, past every lock that a stuck thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"mtp_jax: {text}\n".encode())


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another process."""

    process_id: int
    where: str  # host and process, for people
    channel: Channel

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.where})"


class Leader:
    """The other processes, as process 0 sees them.

    Args:
      cluster: who takes part.
      on_trouble: told that a process is gone or has failed, once; to end this process. The others end too.
      on_stop: told that a process was asked to stop, by a signal for example. None: that is trouble.

    Raises:
      InvalidValueError: process 0 cannot listen where the others will look for it.
    """

    def __init__(self, cluster: Cluster, on_trouble: Told = end_process, on_stop: Told | None = None):
        self.cluster, self.on_trouble, self.on_stop = cluster, on_trouble, on_stop
        self._peers: dict[int, Peer] = {}
        self._answers: dict[str, queue.SimpleQueue[tuple[Peer, Message]]] = {
            kind: queue.SimpleQueue() for kind in (DESCRIBED, READY)
        }
        self._compiling: dict[Bucket, Answers] = {}
        self._guard = threading.Lock()  # of the dictionary above and of `_over`
        self._over = False
        self._listener = _listen(cluster)

    def gather(self, versions: Mapping[str, str], seconds: float = JOIN_SECONDS) -> None:
        """Waits for the other processes, and lets them go on together.

        Raises:
          InvalidValueError: not all of them came in time.
        """
        with self._listener:
            self._gather(versions, seconds)
        for peer in self._peers.values():
            threading.Thread(target=self._listen_to, args=(peer,), name="mtp-jax-peer", daemon=True).start()
        self._tell(Message("go"))

    def _gather(self, versions: Mapping[str, str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        remind = time.monotonic() + REMIND_SECONDS
        self._listener.settimeout(0.5)
        while missing := sorted(set(range(1, self.cluster.num_processes)) - set(self._peers)):
            names = ", ".join(map(str, missing))
            if time.monotonic() > deadline:
                legal = f"all of them within {seconds:g} s; process {names} did not come"
                raise InvalidValueError("--num-processes", self.cluster.num_processes, legal)
            if time.monotonic() > remind:
                log.info("waiting for process %s at %s", names, self.cluster.coordinator)
                remind += REMIND_SECONDS
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            self._welcome(Channel(connection), str(address[0]), versions)

    def _welcome(self, channel: Channel, address: str, versions: Mapping[str, str]) -> None:
        """Lets somebody who has connected in, or tells him why not."""
        try:
            hello = channel.receive(HELLO_SECONDS)
            if hello.kind != "hello":
                raise ChannelClosedError("no hello")
            peer = Peer(hello.number("process_id"), f"{hello.text('host')}, pid {hello.text('pid')}", channel)
            if (reason := self._refusal(peer, hello, versions)) is None:
                self._peers[peer.process_id] = peer
                return
            log.warning("turned %s away: %s", peer, reason)
            channel.send(Message("refused", {"text": reason}))
        except ChannelClosedError as error:
            log.warning("turned somebody at %s away: %s", address, error)
        channel.close()

    def _refusal(self, peer: Peer, hello: Message, versions: Mapping[str, str]) -> str | None:
        count, theirs = self.cluster.num_processes, hello.fields.get("versions")
        if hello.number("num_processes") != count:
            return f"--num-processes: got {hello.number('num_processes')}; expected {count} as in process 0"
        if not 0 < peer.process_id < count:
            return f"--process-id: got {peer.process_id}; expected 1 to {count - 1}"
        if peer.process_id in self._peers:
            taken = self._peers[peer.process_id]
            return f"--process-id: got {peer.process_id}; expected one that nobody has: {taken} is there"
        if theirs != versions:
            return f"versions: got {theirs}; expected {dict(versions)} as in process 0"
        return None

    def agree(self, description: Mapping[str, object], num_pages: int) -> int:
        """Compares what each process is about to build; returns the pages that all have room for.

        Raises:
          InvalidValueError: processes that would build different engines, with the field that differs.
        """
        for peer, message in self._from_each(DESCRIBED):
            theirs = message.fields["description"]
            assert isinstance(theirs, dict)
            for field in sorted(description.keys() | theirs.keys()):
                ours, other = description.get(field), theirs.get(field)
                if ours != other:
                    legal = f"{ours!r} as in process 0: all processes take the same command"
                    raise InvalidValueError(f"{field} of {peer}", other, legal)
            num_pages = min(num_pages, message.number("num_pages"))
        self._tell(Message("agreed", {"num_pages": num_pages}))
        return num_pages

    def wait_ready(self) -> None:
        """Waits until every process has its weights."""
        self._from_each(READY)

    def announce(self, bucket: Bucket) -> Callable[[], None]:
        """Has the others compile a bucket too; what is returned waits for them.

        Compilers of one program may talk to each other across hosts (on GPUs they share what they have
        measured), so all processes must be at the same ones.

        Raises (what is returned):
          RuntimeError: another process could not compile it, or is gone.
        """
        with self._guard:
            answers = self._compiling[bucket] = Answers(self.cluster.num_processes - 1)
            if self._over:
                answers.add("the other processes have ended")
        self._tell(compile_order(bucket))
        return answers.wait

    def launch(self, order: Launch) -> None:
        """Has the others launch a step; to be called in the order in which process 0 launches."""
        self._tell(order.encode())

    def end(self) -> None:
        """Ends the others in good order. Nothing may be under way."""
        if self._claim_the_end():
            self._tell(Message("end"))
            for peer in self._peers.values():
                peer.channel.close()

    def fail(self, text: str, code: int = 1) -> None:
        """Ends the others at once; they print the reason. Where one of them is gone, that is said instead."""
        time.sleep(CULPRIT_SECONDS)
        if self._claim_the_end():
            self._tell(Message("failed", {"text": text, "code": code}))

    def _claim_the_end(self) -> bool:
        """Whether this is the first to end it. Nobody waits for compilers of others any more."""
        with self._guard:
            first, self._over = not self._over, True
            waiting = list(self._compiling.values())
        for answers in waiting:
            answers.add("the other processes have ended")
        return first

    def _from_each(self, kind: str) -> list[tuple[Peer, Message]]:
        return [self._answers[kind].get() for _ in range(1, self.cluster.num_processes)]

    def _tell(self, message: Message) -> None:
        for peer in tuple(self._peers.values()):
            with contextlib.suppress(ChannelClosedError):  # whoever listens to it says so
                peer.channel.send(message)

    def _listen_to(self, peer: Peer) -> None:
        try:
            while True:
                self._hear(peer, peer.channel.receive())
        except ChannelClosedError:
            self._trouble(f"{peer} is gone")

    def _hear(self, peer: Peer, message: Message) -> None:
        if message.kind in self._answers:
            self._answers[message.kind].put((peer, message))
        elif message.kind == COMPILED:
            error = message.text("error")
            with self._guard:
                answers = self._compiling[read_bucket(message)]
            answers.add(f"{peer}: {error}" if error else None)
        elif message.kind == "stop" and self.on_stop is not None:
            self.on_stop(f"{peer} {message.text('text')}")
        else:
            self._trouble(f"{peer} {message.text('text')}")

    def _trouble(self, text: str) -> None:
        if self._claim_the_end():
            say(f"{text}; stopping")
            self._tell(Message("failed", {"text": text, "code": 1}))
            self.on_trouble(text)


class Answers:
    """How far the others are with one executable."""

    def __init__(self, count: int):
        self._missing, self._error = count, ""
        self._changed = threading.Condition()

    def add(self, error: str | None) -> None:
        with self._changed:
            self._missing -= 1
            self._error = self._error or error or ""
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits for all of them, or an error. Raises RuntimeError with the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing <= 0 or self._error)
            if self._error:
                raise RuntimeError(self._error)


def _listen(cluster: Cluster) -> socket.socket:
    """Where the others look for process 0, on all of this host's addresses as JAX's coordinator."""
    try:
        _bind(cluster.port).close()  # JAX's coordinator, which crashes where the port is taken
        return _bind(cluster.plan_port)
    except OSError as error:
        legal = f"a port that is free on this host, as is {cluster.plan_port} ({error.strerror})"
        raise InvalidValueError("--coordinator", cluster.coordinator, legal) from None


def _bind(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
