"""One engine of several processes: how they come together. `leader.py` and `follower.py` run it."""

import time
from collections.abc import Callable

import jax

from mtp_jax import __version__
from mtp_jax.engine.agreement import agree
from mtp_jax.engine.build import Blueprint, construct, draw_blueprint
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.follower import Follower
from mtp_jax.engine.leader import CULPRIT_SECONDS, Leader, Told, end_process
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.orders import Launch
from mtp_jax.engine.step import StepOutput
from mtp_jax.errors import InvalidValueError, UnsupportedHereError
from mtp_jax.progress import Report
from sharding.hosts import Cluster, join


def lead(cluster: Cluster, on_trouble: Told = end_process, on_stop: Told | None = None) -> Leader:
    """Waits for the other processes and joins JAX's runtime with them; in process 0, before JAX's first use.

    Raises:
      InvalidValueError: an address that cannot be listened on, or processes that do not come.
      UnsupportedHereError: JAX cannot join.
    """
    leader = Leader(cluster, on_trouble, on_stop)
    leader.gather(_versions())
    _join(cluster)
    return leader


def build_together(
    options: EngineOptions,
    leader: Leader | None,
    report: Report = lambda phase, done, total: None,
) -> Engine:
    """`build_engine`, in process 0 of several; without a leader this process is alone. Errors end the others.

    Raises:
      InvalidValueError: an option or a checkpoint that cannot be used, or that is another elsewhere.
    """
    try:
        blueprint = draw_together(options, leader)
        return construct(blueprint, report, leader)
    except BaseException as error:
        if leader is not None:
            leader.fail(f"process 0 failed: {type(error).__name__}: {error}")
        raise


def draw_together(options: EngineOptions, leader: Leader | None) -> Blueprint:
    """What all processes are about to build."""
    blueprint = draw_blueprint(options)
    return blueprint if leader is None else agree(blueprint, leader)


def follow(
    cluster: Cluster,
    options: EngineOptions,
    on_joined: Callable[[Follower], None] = lambda follower: None,
    check: bool = False,
) -> None:
    """The whole life of another process: builds its part of the engine and does what process 0 says.

    Returns when process 0 ends in good order. Where it does not, this process is ended, with a message.

    Args:
      cluster: who takes part.
      options: as in process 0.
      on_joined: told of the connection to process 0, once there is one.
      check: build nothing, only compare what would be built.
    """
    follower = Follower(cluster, _versions())
    on_joined(follower)
    try:
        _join(cluster)
        blueprint = agree(draw_blueprint(options), follower)
        if check:
            follower.serve(_nothing)
            return
        engine = construct(blueprint, hosts=follower)
        follower.serve(engine.follow)
        engine.close()
    except (InvalidValueError, UnsupportedHereError) as error:
        follower.fail(f"failed: {error}")
        raise
    except BaseException as error:
        time.sleep(CULPRIT_SECONDS)  # another one may be why
        follower.fail(f"failed: {type(error).__name__}: {error}")
        raise


def _versions() -> dict[str, str]:
    """What must be alike for programs to be."""
    return {"mtp-jax": __version__, "jax": jax.__version__}


def _join(cluster: Cluster) -> None:
    try:
        join(cluster)
    except RuntimeError as error:  # JAX is in use already, or its coordinator cannot start
        reason = " ".join(str(error).split())
        raise UnsupportedHereError(f"JAX cannot join {cluster.coordinator}: {reason}") from error


def _nothing(order: Launch) -> StepOutput:
    raise RuntimeError(f"nothing is built, but process 0 launches {order.bucket.name}")
