"""Failures that other engines have reported (docs/historic-failures.md), by their numbers there.

Each test has a promise, which holds, and the mistake, which is put back: then the promise does not hold.
Left out are those that have no counterpart in one program: processes that wait for one another, buffers that
somebody re-points; and 5, which `test_families.py` holds.
"""

import dataclasses
from collections.abc import Callable

import jax
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.plan_arrays import PlanWriter
from mtp_jax.engine.stand_ins import idle_plan
from mtp_jax.engine.state import state_shapes
from mtp_jax.errors import InvalidValueError
from tests.parity import mistakes
from tests.parity.mistakes import Mistake
from tests.parity.rig import Job, blueprint, greedy, make_engine, renew, run_jobs, tokens_of
from tests.parity.test_trained import FEW, FORGOTTEN, FORGOTTEN_BY, LEAST_ACCEPTED, SHORT
from tests.parity.trained import NAMES, SIZES, K, build, checkpoint, engine_of, held_out, serve

SLOW = pytest.mark.slow
SPARSE, HYBRID, DENSE = "glm_moe_dsa", "qwen3_5_moe", "mimo"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [2, 4])
def test_1_and_18_a_head_is_served_over_stages(
    name: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's layer is none of the target's: any number of stages can have it."""

    def drawn() -> bool:
        program = blueprint(checkpoint(name), stages=stages, num_speculative_tokens=K).program
        return program.layout.with_mtp and program.config.num_speculative_tokens == K

    assert drawn()
    mistakes.refuse_drafts_over_stages(monkeypatch)
    with pytest.raises(InvalidValueError, match="stages"):
        drawn()


def test_6_steps_with_and_without_drafts_have_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step drafts, what it leaves in flight has K + 1 columns: the next one may draft more."""
    drawn = blueprint(checkpoint(DENSE), stages=2, num_speculative_tokens=K, **SIZES)
    shapes = state_shapes(drawn.program.layout, drawn.config)

    def check() -> None:
        first = drawn.buckets.first()[0]
        for drafts in (0, 1, K):
            bucket = dataclasses.replace(first, drafts=drafts)
            plan = PlanWriter(drawn.config, drawn.program.layout.placement).write(
                idle_plan(bucket, drawn.config), bucket
            )
            state, _ = jax.eval_shape(drawn.program.step(bucket), drawn.program.layout.shapes(), shapes, plan)
            assert state == shapes

    check()
    mistakes.send_fewer_columns(monkeypatch)
    with pytest.raises((TypeError, ValueError, AssertionError)):
        check()


def text_is_that_of_plain_decoding(engine: Engine, name: str) -> bool:
    plain = serve(engine_of(name, k=0), name, FEW, SHORT)
    return serve(engine, name, FEW, SHORT).texts == plain.texts


TEXT = [
    (9, DENSE, mistakes.advance_as_if_all_stood),
    (10, HYBRID, mistakes.keep_all_rows),
    (11, DENSE, mistakes.embed_no_drafts),
    (22, SPARSE, mistakes.lose_indices),
    (23, SPARSE, mistakes.number_index_caches_globally),
]


@SLOW
@pytest.mark.parametrize(
    ("number", "name", "mistake"),
    [case for case in TEXT if case[1] in NAMES],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_stages_agree(number: int, name: str, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    """9 to 11, 22, 23: what later stages must know of drafts, counts and positions, they know."""
    if number == 22:
        layout = blueprint(checkpoint(name), stages=2, num_speculative_tokens=K, **SIZES).program.layout
        assert layout.carries_indices, "a stage must begin with a layer that shares an earlier one's indexer"
    assert text_is_that_of_plain_decoding(engine_of(name, 2), name)
    mistake(monkeypatch)
    assert not text_is_that_of_plain_decoding(build(name, 2), name)


DRAFTS = [
    (12, DENSE, mistakes.drafts_of_another_step),
    (15, DENSE, mistakes.skip_fc),
    (16, DENSE, mistakes.foreign_embedding),
    (17, SPARSE, mistakes.stale_draft_indices),
    (18, SPARSE, mistakes.foreign_embedding),
]


@SLOW
@pytest.mark.parametrize(
    ("number", "name", "mistake"),
    [case for case in DRAFTS if case[1] in NAMES],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_drafts_are_as_good_as_at_one_stage(
    number: int, name: str, mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 and 15 to 18, over two stages."""

    def accepted(engine: Engine) -> float:
        return serve(engine, name, FEW, SHORT).accepted(1)

    promised = accepted(engine_of(name, 2))
    assert promised >= LEAST_ACCEPTED and promised == accepted(engine_of(name))
    mistake(monkeypatch)
    assert accepted(build(name, 2)) < FORGOTTEN_BY.get(mistake, FORGOTTEN) * promised


def owners_that_follow(engine: Engine, waits: range) -> list[list[int]]:
    """Answers to prompts that get the slot, and the cached pages, of a request that is aborted in flight."""
    texts = []
    for wait in waits:
        fresh = renew(engine)
        first, second = held_out(DENSE)[:2]
        run_jobs(fresh, {"fills the prefix cache": Job(second, greedy(1))})
        jobs = {
            "aborted": Job(first[: len(second) // 2], greedy(SHORT), aborts=wait),
            "next": Job(second, greedy(SHORT), arrives=wait),
        }
        texts.append(tokens_of(run_jobs(fresh, jobs)["next"]))
    return texts


@SLOW
@pytest.mark.parametrize("stages", [1, 2])
def test_13_a_slot_may_be_taken_while_its_last_owner_is_in_flight(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work in flight for an owner that is gone writes nothing: its pages may belong to the next by then.

    With one stage too: a group is built at the end of one dispatch and runs in the next.
    """
    sizes = SIZES | {"max_num_seqs": 1, "page_size": 4, "stages": stages}
    wanted = list(serve(engine_of(DENSE, k=0), DENSE, 2, SHORT).texts[1])
    waits = range(4, 10)

    def promise(make: Callable[[], Engine]) -> bool:
        return all(text == wanted for text in owners_that_follow(make(), waits))

    def make() -> Engine:
        return make_engine(checkpoint(DENSE), num_speculative_tokens=K, **sizes)

    assert promise(make)
    mistakes.ignore_generations(monkeypatch)
    assert not promise(make)
