"""From options to a plan: what is chosen, what is refused."""

import dataclasses

import pytest

from mtp_jax.engine.build import Blueprint, draw_blueprint
from mtp_jax.engine.options import EngineOptions
from mtp_jax.errors import InvalidValueError
from tests.parity.rig import TINY, RandomSource, Value

PLAIN = dataclasses.replace(TINY, model_type="qwen2", num_nextn_predict_layers=0)


def draw(model=TINY, kv_cache_gib: float | None = None, **overrides: Value) -> Blueprint:
    return draw_blueprint(EngineOptions(kv_cache_gib=kv_cache_gib, overrides=overrides), RandomSource(model))


def test_defaults() -> None:
    """A model with an MTP module speculates as it pays; the context is what machine and model allow."""
    config = draw().config
    assert (config.num_speculative_tokens, config.adaptive_drafts, config.initial_drafts) == (3, True, 0)
    assert draw(num_speculative_tokens="auto").config == config
    fixed = draw(num_speculative_tokens=2).config
    assert (fixed.num_speculative_tokens, fixed.adaptive_drafts, fixed.initial_drafts) == (2, False, 2)
    plain = draw(PLAIN).config
    assert (plain.num_speculative_tokens, plain.adaptive_drafts) == (0, False)
    assert draw(dataclasses.replace(TINY, max_position_embeddings=300)).config.max_model_len == 300
    assert draw().config.dtype == "float32"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"stages": 6}, r"--stages: got 6; expected .*1 to 5"),
        ({"stages": 9}, r"--stages: got 9; .*\(9 x 1 x 1 = 9\) up to 8, the devices"),
        ({"max_model_len": 20000}, r"--max-model-len: got 20000; expected up to 16384"),
        ({"num_speculative_tokens": 9}, r"num_speculative_tokens: got 9; expected 0 to 8"),
        ({"page_size": 6}, r"page_size: got 6; expected a multiple of 4"),
        ({"max_rounds": 3}, r"max_rounds: got 3"),
        ({"max_num_seqs": 0}, r"max_num_seqs: got 0"),
        ({"data": 2, "max_num_seqs": 7}, r"--max-num-seqs: got 7; expected a multiple of --data, 2"),
        (
            {"data": 2, "experts_over": "data-tensor"},
            r"--experts-over: .*; expected tensor: this",
        ),
        ({"experts_over": "data"}, r"experts_over: got 'data'; expected tensor or data-tensor"),
        ({"data": 0}, r"data: got 0; expected an integer of at least 1"),
        ({"stages": 2, "stage_layers": (3, 3)}, r"--stage-layers: got '3,3'; .* add up to 5, .* such as 3,2"),
        ({"stages": 2, "stage_layers": (5,)}, r"stage_layers: got '5'; expected 2 integers"),
        ({"stages": 2, "stage_layers": (5, 0)}, r"stage_layers: got '5,0'; expected 2 integers"),
    ],
)
def test_refusals(overrides: dict[str, Value], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        draw(**overrides)


def test_drafts_need_a_head() -> None:
    with pytest.raises(InvalidValueError, match=r"--num-speculative-tokens: got 2; .*--mtp-head"):
        draw(PLAIN, num_speculative_tokens=2)


def test_an_unknown_family() -> None:
    source = RandomSource(TINY)
    source.config = dataclasses.replace(TINY, model_type="mamba")
    with pytest.raises(InvalidValueError, match=r"model_type: got 'mamba'; expected llama or qwen2 or mimo"):
        draw_blueprint(EngineOptions(), source)


def test_replicas() -> None:
    """Slots are divided among them, pages are each one's; a default number of slots divides."""
    drawn = draw(data=2, max_num_seqs=6, num_pages=40)
    assert (drawn.config.slots_per_replica, drawn.config.num_pages) == (3, 40)
    assert "stage 1 x data 2 x tensor 1" in drawn.describe()
    assert draw(data=3).config.max_num_seqs == 18
    small = {"max_num_seqs": 6, "max_model_len": 64, "page_size": 16, "enable_prefix_caching": False}
    assert draw(data=2, **small).config.num_pages == 3 * 4


def test_memory_choices() -> None:
    """Pages: as given; as many as the bytes hold; else what suits the slots."""
    assert draw(num_pages=77).config.num_pages == 77
    given = draw(kv_cache_gib=0.01)
    assert given.memory.cache <= 0.01 * 2**30 < given.memory.cache + given.memory.page
    small = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16}
    assert draw(**small).config.num_pages == 4 * 2 * 4, "four times the slots, for the prefix cache"
    assert draw(**small, enable_prefix_caching=False).config.num_pages == 2 * 4
    with pytest.raises(InvalidValueError, match=r"--kv-cache-gib: got 1e-09; expected at least"):
        draw(kv_cache_gib=1e-9)


def test_stage_layers() -> None:
    plan = draw(stages=2, stage_layers=(1, 4)).program.layout.plan
    assert plan.layers == ((0,), (1, 2, 3, 4))


def test_describe() -> None:
    text = draw(stages=2, num_pages=40).describe()
    for part in (
        "random mimo",
        "stage 2 x data 1 x tensor 1",
        "0-2 | 3-4",
        "K = 0 to 3 as measured, greedy drafts",
        "40 pages",
    ):
        assert part in text
    assert "off (K = 0)" in draw(PLAIN).describe()
    assert "K = 1, greedy drafts" in draw(num_speculative_tokens=1).describe()
