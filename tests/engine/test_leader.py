"""Messages between processes, and who is let in; over real sockets, in threads instead of processes."""

import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mtp_jax.engine import follower
from mtp_jax.engine.buckets import Bucket, Report, Sampling
from mtp_jax.engine.channel import Channel, ChannelClosedError, Message
from mtp_jax.engine.follower import Follower
from mtp_jax.engine.leader import Leader
from mtp_jax.engine.orders import Launch, compile_order, read_bucket
from mtp_jax.engine.plan_arrays import GuidedRows, PlanChanges
from mtp_jax.engine.shaping_slots import Installation, slot_arrays
from mtp_jax.errors import InvalidValueError
from mtp_jax.request import SamplingParams
from mtp_jax.scheduler.plan import Shaping
from sharding.hosts import Cluster
from tests.hosts.running import free_port

VERSIONS = {"mtp-jax": "1", "jax": "2"}
BUCKET = Bucket(2, 4, 8, 16, 1, Sampling.SHAPED, Report.TOKENS)


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


def test_an_order_arrives_as_it_was_sent() -> None:
    params = SamplingParams(presence_penalty=0.5, logit_bias={3: 1.0}, max_tokens=4)
    shaping = Shaping(params, 2, (1, 2, 3), (0,), ((5, 6),))
    rows = slot_arrays(Installation(1, 7, shaping), 32)
    fields = {"table": np.arange(12, dtype=np.int32).reshape(3, 4), "seed": np.zeros((2, 2), np.uint32)}
    guided = GuidedRows(np.array([1], np.int32), np.arange(4, dtype=np.uint32).reshape(1, 2, 2))
    order = Launch(BUCKET, PlanChanges(fields, {"slot": np.zeros(0, np.int32)}, guided), [(1, rows)])
    with pair() as (one, other):
        here, there = Channel(one), Channel(other)
        here.send(order.encode())
        here.send(compile_order(BUCKET))
        got = Launch.decode(there.receive())
        assert got.bucket == BUCKET and got.installations[0][0] == 1
        assert isinstance(got.bucket.sampling, Sampling) and isinstance(got.bucket.report, Report)
        assert got.changes.chunks is not None and got.changes.fields.keys() == fields.keys()
        for name, array in fields.items():
            assert got.changes.fields[name].dtype == array.dtype
            np.testing.assert_array_equal(got.changes.fields[name], array)
        assert got.changes.guided is not None
        np.testing.assert_array_equal(got.changes.guided.slots, guided.slots)
        np.testing.assert_array_equal(got.changes.guided.masks, guided.masks)
        for name, array in vars(rows).items():
            np.testing.assert_array_equal(getattr(got.installations[0][1], name), array)
            assert getattr(got.installations[0][1], name).dtype == np.asarray(array).dtype
        assert read_bucket(there.receive()) == BUCKET
        here.close()
        with pytest.raises(ChannelClosedError):
            there.receive()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\1", b"\0\0\0\1x"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pair() as (stranger, ours):
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosedError):
            Channel(ours).receive(1.0)


def launch(*followers: Callable[[int], Follower], seconds: float = 20.0) -> tuple[Leader, list]:
    """A leader for one other process, and what came of those who wanted to be it, in their order."""
    port = free_port()
    leader = Leader(Cluster(f"127.0.0.1:{port}", 2, 0), on_trouble=lambda text: None)
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        gathering = pool.submit(leader.gather, VERSIONS, seconds)
        for follower in followers:
            coming = pool.submit(follower, port)
            try:
                outcomes.append(coming.result(20))
            except InvalidValueError as error:
                outcomes.append(error)
        gathering.result(30)
    return leader, outcomes


def test_only_who_belongs_here_is_let_in() -> None:
    def one(count: int = 2, process: int = 1, versions: dict[str, str] = VERSIONS):
        return lambda port: Follower(Cluster(f"127.0.0.1:{port}", count, process), versions, 10)

    older = VERSIONS | {"jax": "1"}
    wrong = (one(count=3), one(count=3, process=2), one(versions=older))
    leader, outcomes = launch(*wrong, one())
    texts = [str(outcome) for outcome in outcomes[:3]]
    assert "--num-processes: got 3; expected 2" in texts[0] and "--num-processes" in texts[1]
    assert "versions" in texts[2] and isinstance(outcomes[3], Follower)

    def told() -> int:
        return outcomes[3].agree({"stages": 2, "dtype": "float32"}, 40)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        same = pool.submit(told)
        assert leader.agree({"stages": 2, "dtype": "float32"}, 50) == 40 == same.result(10)
        pool.submit(outcomes[3]._channel.send, Message("described", {"description": {}, "num_pages": 1}))
        with pytest.raises(InvalidValueError, match=r"dtype of process 1 .*got None; expected 'float32'"):
            leader.agree({"dtype": "float32"}, 50)
    leader.end()


def coming(port: int) -> Follower:
    return Follower(Cluster(f"127.0.0.1:{port}", 2, 1), VERSIONS, 10)


def test_a_compiler_s_mistake_elsewhere_is_not_kept() -> None:
    leader, (other,) = launch(coming)
    mistakes = [MemoryError("no memory")]

    def compile_bucket(bucket: Bucket) -> None:
        if mistakes:
            raise mistakes.pop()

    other.compile_with(compile_bucket)
    with pytest.raises(RuntimeError, match="no memory"):
        leader.announce(BUCKET)()
    leader.announce(BUCKET)()
    leader.end()


@pytest.mark.parametrize("how", ["gone", "told"])
def test_nobody_waits_for_compilers_of_the_dead(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Whether they went by themselves or were told to, before the order or after it."""
    monkeypatch.setattr(follower, "end_process", lambda *_: None)
    leader, (other,) = launch(coming)
    everywhere = leader.announce(BUCKET)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(everywhere)
        if how == "gone":
            other._channel.close()
        else:
            leader.fail("process 0 failed")
        with pytest.raises(RuntimeError, match="have ended"):
            waiting.result(10)
    with pytest.raises(RuntimeError, match="have ended"):
        leader.announce(BUCKET)()
    for channel in (other._channel, *(peer.channel for peer in leader._peers.values())):
        channel.close()
    for thread in threading.enumerate():  # while it cannot end this process
        if thread.name == "mtp-jax-leader":
            thread.join(10)


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(InvalidValueError, match="process 1 did not come"):
        launch(seconds=0.1)


def test_a_port_that_is_taken_is_named() -> None:
    port = free_port()
    for taken in (port, port + 1):
        with socket.create_server(("", taken)), pytest.raises(InvalidValueError, match="--coordinator"):
            Leader(Cluster(f"127.0.0.1:{port}", 2, 0))
    with pytest.raises(InvalidValueError, match=f"listens on {port + 1}"):
        Follower(Cluster(f"127.0.0.1:{port}", 2, 1), VERSIONS, 0.1)
