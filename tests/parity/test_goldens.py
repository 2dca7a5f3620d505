"""The engine's logits and drafts against goldens that transformers and plain torch computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.engine.draft import Drafter
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.head import Head
from mtp_jax.loading import WeightSource, resolve_model
from mtp_jax.request import RequestOutput
from tests.oracle.prompts import PROMPTS
from tests.parity.rig import Job, Value, blueprint, greedy, make_engine, renew, run_jobs, state_of, tokens_of
from tests.parity.tap import Tap, tapped

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-3


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


# SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> tuple[Engine, Tap]:
    with tapped() as tap:
        sizes = {"max_model_len": 352, "page_size": 16, "num_pages": 96, "max_num_seqs": 3}
        plain = {"num_speculative_tokens": 0, "prefill_chunk": 64}  # a row a step, so that the tap has all
        return make_engine(resolve_model(), **sizes, **plain), tap


@pytest.fixture(scope="module")
def smollm2_run(smollm2: tuple[Engine, Tap]) -> tuple[dict[str, list[int]], Tap]:
    """All three prompts at once, 64 greedy tokens each."""
    engine, tap = smollm2
    stored = golden("smollm2")
    jobs = {name: Job(tuple(stored[f"{name}_ids"].tolist()), greedy(64)) for name in PROMPTS}
    outputs = run_jobs(renew(engine), jobs)
    return {name: tokens_of(outputs[name]) for name in PROMPTS}, tap


@pytest.mark.parametrize("name", PROMPTS)
def test_smollm2_logits(name: str, smollm2_run: tuple[dict[str, list[int]], Tap]) -> None:
    """Every prompt position's best logit, and 512 + 8 logits and the normaliser at 16 of them."""
    stored, (_, tap) = golden("smollm2"), smollm2_run
    ids = stored[f"{name}_ids"]
    assert len(ids) >= 200
    logits = tap.prompt_logits(1 + list(PROMPTS).index(name), len(ids))
    some = logits[stored[f"{name}_positions"]]
    wide = some.astype(np.float64)
    errors = {
        "max": logits.max(-1) - stored[f"{name}_max"],
        "subset": some[:, stored["subset"]] - stored[f"{name}_subset_logits"],
        "top8": np.take_along_axis(some, stored[f"{name}_top8_ids"], -1) - stored[f"{name}_top8"],
        "logsumexp": np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1))
        + wide.max(-1)
        - stored[f"{name}_logsumexp"],
    }
    largest = {kind: float(np.abs(error).max()) for kind, error in errors.items()}
    print(name, {kind: f"{error:.1e}" for kind, error in largest.items()})
    assert max(largest.values()) < TOLERANCE
    np.testing.assert_array_equal(logits.argmax(-1), stored[f"{name}_argmax"])


@pytest.mark.parametrize("name", PROMPTS)
def test_smollm2_greedy(name: str, smollm2_run: tuple[dict[str, list[int]], Tap]) -> None:
    """64 tokens, and the two best logits at each of these steps."""
    stored, (tokens, tap) = golden("smollm2"), smollm2_run
    assert tokens[name] == stored[f"{name}_greedy"].tolist()
    generation, length = 1 + list(PROMPTS).index(name), len(stored[f"{name}_ids"])
    logits = np.stack([tap.rows[generation, length - 1 + step].logits[0] for step in range(64)])
    best = np.take_along_axis(logits, stored[f"{name}_greedy_top2_ids"], -1)
    assert np.abs(best - stored[f"{name}_greedy_top2"]).max() < TOLERANCE


# Tiny models: every family, dtype on disk and rotary scaling


@contextmanager
def forced(ids: np.ndarray, accept: int) -> Iterator[None]:
    """Engines compiled inside emit `ids` whatever the logits say, and accept this many drafts a round."""
    table = np.pad(ids, (0, 64)).astype(np.int32)
    verify = Head._verify

    def force(self: Head, slots, rows, hidden):
        _, _, reports = verify(self, slots, rows, hidden)
        columns = jnp.arange(hidden.shape[1], dtype=jnp.int32)
        tokens = jnp.asarray(table)[rows.start[:, None] + columns + 1]
        offered = jnp.sum(rows.drafts >= 0, axis=1, dtype=jnp.int32)
        return tokens, jnp.minimum(offered, accept), reports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Head, "_verify", force)
        yield


def tiny_checkpoint(name: str) -> WeightSource:
    """Only one of them brings a tokenizer; their ids mean the same in all."""
    source = resolve_model(GOLDEN / name)
    source.tokenizer = resolve_model(GOLDEN / "tiny_mimo").tokenizer  # type: ignore[method-assign]
    return source


# Another order of fp32 sums gives up to 2e-5 on these logits; the smallest mistake that the oracle's scripts
# try (a norm's eps of 1e-5 for 1e-6) gives 4e-4.
FAMILY_TOLERANCE = 2e-4
# Position 55 of this one is badly conditioned: one ulp in the embedding alone moves its logits by 8e-5, six
# times as much as others (0.8 to 1.2e-5), and its prefill and its decoding differ by 1.5e-4. So that no other
# position hides behind it, the median over positions is held as well, for all families.
BADLY_CONDITIONED = {"tiny_qwen3_5_moe": 1e-3}
MEDIAN_TOLERANCE = 5e-5
FAMILIES = ("tiny_deepseek_v3", "tiny_deepseek_v32", "tiny_glm_moe_dsa", "tiny_glm4_moe")
FAMILIES += ("tiny_qwen3_next", "tiny_qwen3_5", "tiny_qwen3_5_moe", "tiny_qwen4_exp")
LOGITS = [("tiny_qwen2", 1), ("tiny_llama3", 2), ("tiny_mimo", 2), ("tiny_moonlight", 1)]
LOGITS += [(name, 2) for name in FAMILIES]
LOGITS += [pytest.param(name, 1, marks=pytest.mark.slow) for name in FAMILIES]
DRAFTS = [("tiny_mimo", 1), ("tiny_mimo", 2), *((name, 1) for name in FAMILIES[:-1])]
DRAFTS += [pytest.param(name, 2, marks=pytest.mark.slow) for name in FAMILIES]
DRAFTS += [pytest.param(name, 1, marks=pytest.mark.slow) for name in ("tiny_qwen4_exp", "tiny_moonlight")]


@pytest.mark.parametrize(("name", "stages"), LOGITS)
def test_tiny_logits(name: str, stages: int) -> None:
    check_tiny_logits(name, stages=stages)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tiny_logits_with_a_mixed_slot(tensor: int) -> None:
    """A layer with an indexer shares its slot with a layer of another stage that has none."""
    plan = blueprint(tiny_checkpoint("tiny_glm_moe_dsa"), stages=2, stage_layers=(4, 1)).program.layout.plan
    assert plan.num_slots == 4 and len(plan.mixed) == 1
    check_tiny_logits("tiny_glm_moe_dsa", stages=2, stage_layers=(4, 1), tensor=tensor)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("name", ["tiny_qwen3_next", "tiny_qwen4_exp"])
def test_tiny_logits_in_small_chunks(name: str, chunk: int) -> None:
    """Convolutions' windows, states and n-grams reach back over several chunks, and blocks begin in one."""
    check_tiny_logits(name, stages=1, prefill_chunk=chunk)


def check_tiny_logits(name: str, stages: int, **layout: Value) -> None:
    """Prefilled in chunks, then again one by one through the decode rows."""
    stored = golden(name)
    ids = stored["ids"]
    sizes = {"stages": stages, "num_speculative_tokens": 0, "max_num_seqs": 4, "num_pages": 64} | layout
    with forced(ids, 0), tapped() as tap:
        engine = make_engine(tiny_checkpoint(name), **sizes)
        jobs = {
            "prefilled": Job(tuple(ids.tolist()), greedy(1)),
            "decoded": Job(tuple(ids[:1].tolist()), greedy(len(ids) - 1)),
        }
        outputs = run_jobs(engine, jobs)
    assert tokens_of(outputs["decoded"]) == ids[1:].tolist()
    vocab = stored["logits"].shape[1]
    prefilled = tap.prompt_logits(1, len(ids))[:, :vocab]
    decoded = np.stack([tap.rows[2, p].logits[0, :vocab] for p in range(len(ids) - 1)])
    pairs = ((prefilled, stored["logits"]), (decoded, stored["logits"][:-1]))
    by_position = [np.abs(got - wanted).max(axis=1) for got, wanted in pairs]
    errors = [float(error.max()) for error in by_position]
    print(name, stages, "prefill and decode:", [f"{error:.1e}" for error in errors])
    assert max(errors) < BADLY_CONDITIONED.get(name, FAMILY_TOLERANCE)
    assert max(float(np.median(error)) for error in by_position) < MEDIAN_TOLERANCE


def slots_after_each_step(
    engine: Engine, prompt: np.ndarray, tokens: int
) -> dict[int, dict[str, np.ndarray]]:
    """Serves one request; the slot as every dispatch left it, by the position that its drafts start from."""
    seen: dict[int, dict[str, np.ndarray]] = {}
    step = engine.step

    def watched() -> list[RequestOutput]:
        outputs = step()
        slots = jax.device_get(state_of(engine).slots)
        if slots.length[0] > 0:
            seen[int(slots.length[0]) - 1] = {"drafts": slots.drafts[0], "logits": slots.draft_logits[0]}
        return outputs

    engine.step = watched  # type: ignore[method-assign]
    run_jobs(engine, {"a": Job(tuple(prompt.tolist()), greedy(tokens))})
    return seen


@pytest.mark.parametrize(("name", "stages"), DRAFTS)
def test_tiny_drafts(name: str, stages: int) -> None:
    """Nothing is ever accepted: each round draws K drafts anew, the later ones from recycled states."""
    stored = golden(name)
    ids = stored["ids"]
    sizes = {"stages": stages, "num_speculative_tokens": 3, "max_num_seqs": 1, "num_pages": 64}
    with forced(ids, 0):
        engine = make_engine(resolve_model(GOLDEN / name), draft_sampling="probabilistic", **sizes)
        seen = slots_after_each_step(engine, ids[:1], len(ids) + 3)
    assert set(seen) >= set(range(len(ids) - 1)), "a position from which nothing was drafted"
    first = np.stack([seen[p]["logits"][0] for p in range(len(ids) - 1)])
    errors = [np.abs(first - stored["mtp_logits"]).max()]
    for index, anchor in enumerate(stored["anchors"].tolist()):
        np.testing.assert_array_equal(seen[anchor]["drafts"], stored["draft_ids"][index])
        errors.append(np.abs(seen[anchor]["logits"] - stored["draft_logits"][index]).max())
    print(name, stages, "teacher-forced, then recycled from each anchor:", [f"{e:.1e}" for e in errors])
    assert max(errors) < FAMILY_TOLERANCE


def test_mimo_after_accepted_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind accepted drafts hold the target's hidden states, not recycled ones."""
    stored = golden("tiny_mimo")
    ids = stored["ids"]
    propose = Drafter._propose

    def right(self: Drafter, output, slot, position):
        _, logits = propose(self, output, slot, position)
        return jnp.asarray(np.pad(ids, (0, 64)).astype(np.int32))[position], logits

    monkeypatch.setattr(Drafter, "_propose", right)
    with forced(ids, 3):
        sizes = {"num_speculative_tokens": 3, "max_num_seqs": 1, "num_pages": 64}
        engine = make_engine(resolve_model(GOLDEN / "tiny_mimo"), draft_sampling="probabilistic", **sizes)
        seen = slots_after_each_step(engine, ids[:20], len(ids) - 12)
    anchors = [p for p in sorted(seen) if p < len(ids) - 1]
    assert anchors == list(range(19, len(ids) - 1, 4)), "rounds that did not accept all three"
    errors = [np.abs(seen[p]["logits"][0] - stored["mtp_logits"][p]).max() for p in anchors]
    assert max(errors) < TOLERANCE
