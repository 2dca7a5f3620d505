"""The ring does not drain: stage-ticks with work over all stage-ticks, from the engine's own counters."""

import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.request import EngineRequest
from tests.parity.engines import shared_engine
from tests.parity.rig import TINY, greedy, renew


def engine_of(stages: int, k: int) -> Engine:
    return renew(shared_engine(stages, k), max_rounds=1)


def add(engine: Engine, name: str, prompt: int, tokens: int) -> None:
    ids = np.random.default_rng(len(name)).integers(0, TINY.vocab_size, prompt)
    engine.add_request(EngineRequest(name, tuple(ids.tolist()), greedy(tokens), seed=1000))


def useful_share(engine: Engine, steps: int) -> tuple[float, int]:
    """(useful stage-ticks / stage-ticks, stage-ticks) of the dispatches read during these steps."""
    before = engine.stats()
    for _ in range(steps):
        engine.step()
    after = engine.stats()
    ticks = after.ticks - before.ticks
    assert ticks == (engine.config.stages**2) * steps
    return (after.useful_ticks - before.useful_ticks) / ticks, ticks


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("per_group", [1, 2])
def test_steady_decode(stages: int, k: int, per_group: int) -> None:
    """As many requests as groups, or more: every stage works at every tick."""
    engine = engine_of(stages, k)
    for index in range(stages * per_group):
        add(engine, f"{index}", 3 + index, 80)
    for _ in range(12):  # all prompts in, all rows in flight
        engine.step()
    assert engine.stats().num_running == stages * per_group
    share, ticks = useful_share(engine, 6)
    print(f"Z = {stages}, K = {k}, {stages * per_group} requests: {share:.1%} of {ticks}")
    assert engine.stats().num_running == stages * per_group
    assert share == 1.0


def test_one_request_cannot_fill_the_ring() -> None:
    """The counter counts what it says: one request at Z = 4 is in one stage at a time."""
    engine = engine_of(4, 0)
    add(engine, "alone", 3, 60)
    for _ in range(8):
        engine.step()
    assert useful_share(engine, 6)[0] == 0.25


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("stages", [2, 4])
def test_mixed_load(stages: int, k: int) -> None:
    """Short completions, and always two prompts that wait."""
    engine, rng, count = engine_of(stages, k), np.random.default_rng(0), 0
    shares = []
    for phase in range(3):
        before = engine.stats()
        for _ in range(15 if phase == 0 else 60):
            while engine.stats().num_waiting < 2:
                ids = rng.integers(0, TINY.vocab_size, rng.integers(4, 60))
                name = f"request-{count}"
                engine.add_request(
                    EngineRequest(name, tuple(ids.tolist()), greedy(int(rng.integers(4, 30))), seed=1000)
                )
                count += 1
            engine.step()
        after = engine.stats()
        if phase:  # the first fills the ring
            shares.append((after.useful_ticks - before.useful_ticks) / (after.ticks - before.ticks))
    print(f"Z = {stages}, K = {k}: {', '.join(f'{share:.1%}' for share in shares)}, {count} requests")
    assert min(shares) >= 0.9
