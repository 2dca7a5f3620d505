"""A checkpoint of float8 blocks stays in float8, and equals its dequantised twin."""

import functools
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_jax.convert import convert
from mtp_jax.engine.build import Blueprint, draw_blueprint
from mtp_jax.engine.options import EngineOptions
from mtp_jax.engine.placed import load_weights
from mtp_jax.engine.weights import Weights
from mtp_jax.loading import resolve_model
from mtp_jax.loading.formats import planned_blocks
from mtp_jax.loading.hf_config import config_from_directory
from mtp_jax.models.registry import expected_tensors
from mtp_jax.models.scaled import BlockScaled
from mtp_jax.plan.devices import DEVICES
from mtp_jax.plan.draw import draw_plan
from tests.engine import fp8_checkpoint
from tests.loading.packers import edit_config
from tests.parity.rig import Job, greedy, make_engine, run_jobs, tokens_of

RAGGED = (7, 12)  # neither divides the widths, 8 to 64: most last blocks are partial
EVEN = (7, 8)  # columns that heads and two shards divide


def arrays(directory: Path, **overrides: int) -> tuple[Weights, Blueprint]:
    blueprint = draw_blueprint(EngineOptions(str(directory), overrides=overrides))
    layout = blueprint.program.layout
    return load_weights(blueprint.source, layout, blueprint.read_mtp, lambda done, total: None), blueprint


def is_scaled(leaf: object) -> bool:
    return isinstance(leaf, BlockScaled)


def value(leaf: jax.Array | BlockScaled) -> np.ndarray:
    """What a leaf stands for, column by column: unlike the engine."""
    if not isinstance(leaf, BlockScaled):
        return np.asarray(leaf)
    codes, scales = np.asarray(leaf.codes).astype(np.float32), np.asarray(leaf.scales)
    columns = [codes[..., i] * scales[..., i // leaf.group] for i in range(codes.shape[-1])]
    return np.stack(columns, -1).astype(ml_dtypes.bfloat16).astype(np.float32)


def check_twins(got: Weights, twin: Weights) -> list[BlockScaled]:
    """Leaf by leaf; returns those that are in float8."""
    pairs = zip(jax.tree.leaves(got, is_leaf=is_scaled), jax.tree.leaves(twin), strict=True)
    scaled = []
    for mine, theirs in pairs:
        np.testing.assert_array_equal(value(mine), theirs)
        scaled += [mine] if isinstance(mine, BlockScaled) else []
    return scaled


@pytest.mark.parametrize(
    ("block", "ue8m0", "layout"),
    [
        (RAGGED, False, {}),
        (RAGGED, True, {"stages": 2}),
        (EVEN, False, {"tensor": 2}),
        (EVEN, True, {"stages": 2, "tensor": 2}),
    ],
)
def test_weights_are_those_of_the_twin(
    tmp_path: Path, block: tuple[int, int], ue8m0: bool, layout: dict[str, int]
) -> None:
    packed, plain = fp8_checkpoint.write(tmp_path, "tiny_deepseek_v3", block, ue8m0=ue8m0)
    got, _ = arrays(packed, **layout)
    scaled = check_twins(got, arrays(plain, **layout)[0])
    assert len(scaled) > 25
    for leaf in scaled:
        assert leaf.codes.dtype == ml_dtypes.float8_e4m3fn and leaf.scales.dtype == np.float32
    assert any(leaf.shape[-1] % leaf.group for leaf in scaled) == (block == RAGGED)


def test_what_is_not_quantised_everywhere_is_not_float8(tmp_path: Path) -> None:
    """Layers of one slot are one array: with one of them excluded, the others are dequantised."""
    kept = ("layers.2.self_attn.q_b_proj", "layers.4.mlp.experts.3.down_proj")  # layer 4: the MTP module's
    packed, plain = fp8_checkpoint.write(tmp_path, "tiny_deepseek_v3", EVEN, kept=kept)
    got, blueprint = arrays(packed, stages=2)
    check_twins(got, arrays(plain, stages=2)[0])
    groups = blueprint.program.layout.groups
    plan = blueprint.program.layout.plan
    mixed = next(slot for slot in range(plan.num_slots) if 2 in plan.slots[slot])
    other = next(slot for slot in range(plan.num_slots) if slot != mixed)
    assert f"{mixed}.attention.q_up" not in groups and f"{other}.attention.q_up" in groups
    assert "mtp.layer.ffn.down" not in groups and "mtp.layer.ffn.gate_up" in groups


@pytest.mark.parametrize("layout", [{}, {"stages": 2, "tensor": 2}])
def test_a_plan_knows_what_stays_in_float8(tmp_path: Path, layout: dict[str, int]) -> None:
    """From config.json alone: its list of exclusions, and what is never in float8."""
    kept = ("layers.2.self_attn.q_b_proj", "mlp.shared_experts.down_proj")
    packed, _ = fp8_checkpoint.write(tmp_path, "tiny_deepseek_v3", EVEN, kept=kept)
    (packed / "model.safetensors").rename(tmp_path / "weights")
    model = config_from_directory(packed)
    blocks = planned_blocks(packed, expected_tensors(model))
    options = EngineOptions(str(packed), dtype="float32", overrides={"num_pages": 64, **layout})
    plan = draw_plan(model, options, DEVICES["h200"], blocks)
    (tmp_path / "weights").rename(packed / "model.safetensors")
    got, blueprint = arrays(packed, num_pages=64, **layout)
    assert plan.layout.groups == blueprint.program.layout.groups and len(plan.layout.groups) > 10
    assert plan.memory.weights == blueprint.memory.weights
    held = [shard.data.nbytes for leaf in jax.tree.leaves(got) for shard in leaf.addressable_shards]
    assert plan.memory.weights * plan.num_devices == sum(held)


def test_placed_arrays_come_back_in_float8(tmp_path: Path) -> None:
    packed, _ = fp8_checkpoint.write(tmp_path, "tiny_deepseek_v3", EVEN)
    convert(packed, tmp_path / "out", layout={"stages": 2})
    expected, got = (arrays(folder, stages=2)[0] for folder in (packed, tmp_path / "out"))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert any(map(is_scaled, jax.tree.leaves(got, is_leaf=is_scaled)))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype and np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


PROMPTS = tuple(tuple(np.random.default_rng(7).integers(3, 250, length).tolist()) for length in (3, 17, 40))
MODELS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next", "qwen3_5_moe", "qwen4_exp", "mimo")
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
IN_CI = (("mimo", 2, 2),)


def texts(directory: Path, **overrides: int) -> list[list[int]]:
    engine = make_engine(resolve_model(directory), **overrides)
    jobs = {str(index): Job(prompt, greedy(12)) for index, prompt in enumerate(PROMPTS)}
    outputs = run_jobs(engine, jobs)
    return [tokens_of(outputs[name]) for name in jobs]


@functools.cache
def written(folder: Path, model: str) -> tuple[Path, list[list[int]]]:
    """The float8 checkpoint, and what its twin says, decoding plainly."""
    packed, plain = fp8_checkpoint.write(folder, f"tiny_{model}", EVEN)
    return packed, texts(plain, num_speculative_tokens=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {model: tmp_path_factory.mktemp(model) for model in MODELS}


@pytest.mark.parametrize(
    ("model", "stages", "tensor"),
    [
        pytest.param(model, *layout, marks=() if (model, *layout) in IN_CI else pytest.mark.slow)
        for model in MODELS
        for layout in LAYOUTS
    ],
)
def test_text_is_that_of_the_twin(folders: dict[str, Path], model: str, stages: int, tensor: int) -> None:
    packed, expected = written(folders[model], model)
    assert texts(packed, stages=stages, tensor=tensor, num_speculative_tokens=2) == expected


# The table of n-grams: half of Qwen4Exp's bytes. The golden model's rows are too short for scales.

NUM_HEADS, ROW = (
    8,
    12,
)  # rows of the table for a token, and their width: a block of 8 columns and a partial one


def wide_table(folder: Path) -> Path:
    """The golden Qwen4Exp with longer rows in its table of n-grams."""
    made = Path(shutil.copytree(fp8_checkpoint.GOLDEN / "tiny_qwen4_exp", folder / "wide"))
    rng, tensors = np.random.default_rng(3), load_file(made / "model.safetensors")
    for name, value in tensors.items():
        if ".ngram_embedding." in name:
            tensors[name] = rng.normal(size=(value.shape[0], ROW)).astype(np.float32)
        elif name.endswith(("ple.key_proj.weight", "ple.value_proj.weight")):
            wide = rng.normal(scale=0.3, size=(value.shape[0], NUM_HEADS * ROW))
            tensors[name] = wide.astype(np.float32)
    save_file(tensors, made / "model.safetensors")
    text = json.loads((made / "config.json").read_text())["text_config"]
    edit_config(made, text_config=text | {"ple_embed_dim": NUM_HEADS * ROW})
    return made


def test_a_table_of_ngrams_stays_in_float8(tmp_path: Path) -> None:
    stages, tensor = 2, 2
    packed, plain = fp8_checkpoint.write(tmp_path, wide_table(tmp_path), EVEN)
    got, blueprint = arrays(packed, stages=stages, tensor=tensor)
    check_twins(got, arrays(plain, stages=stages, tensor=tensor)[0])
    assert isinstance(got.ngrams, BlockScaled) and got.ngrams.scales.shape[-1] == 2
    held = {shard.data.nbytes for leaf in jax.tree.leaves(got.ngrams) for shard in leaf.addressable_shards}
    assert sum(held) == blueprint.memory.parts.ngrams


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "tensor"), LAYOUTS[:2] + LAYOUTS[3:])
def test_text_with_a_table_of_ngrams_in_float8(tmp_path: Path, stages: int, tensor: int) -> None:
    packed, plain = fp8_checkpoint.write(tmp_path, wide_table(tmp_path), EVEN)
    expected = texts(plain, num_speculative_tokens=0)
    assert texts(packed, stages=stages, tensor=tensor, num_speculative_tokens=2) == expected
