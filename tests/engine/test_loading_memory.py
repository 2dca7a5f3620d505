"""Host memory while a checkpoint is read: the placed arrays, and about one tensor more."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mtp_jax.config import ModelConfig
from mtp_jax.loading.hf_config import config_from_directory
from mtp_jax.models.registry import expected_tensors
from tests.house.source import ROOT

# In a process of its own, whose peak is that of this loading alone.
SCRIPT = """
import sys
import jax, jax.numpy as jnp
from mtp_jax.engine.weights import WeightLayout, with_float8
from mtp_jax.loading import SafetensorsDir
from mtp_jax.models.leaves import ReadScaled
from sharding.mesh import make_mesh
from sharding.placement import make_placement
from sharding.stage_plan import balanced_plan

def memory(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

source = SafetensorsDir(sys.argv[1])
placement = make_placement(make_mesh(1), {})
plan = balanced_plan(source.config.num_hidden_layers, 1)
layout = WeightLayout(source.config, plan, placement, jnp.dtype("bfloat16"), False)
layout = with_float8(layout, source.blocks)
scaled = ReadScaled(source.read_codes, source.read_scales)
jax.block_until_ready(jnp.ones(1000) + 1)
before = memory("VmRSS")
weights = layout.load(source.read, None, lambda done, total: None, source.names(), scaled=scaled)
jax.block_until_ready(weights)
placed = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
print(placed, memory("VmHWM") - before)
"""
BLOCK = 128


def write(directory: Path, shard: int, *, fp8: bool, **sizes: int) -> None:
    """A Llama of these sizes in shards of at most `shard` bytes."""
    fields = {"model_type": "llama", "num_attention_heads": 8, "tie_word_embeddings": True} | sizes
    quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    fields |= {"quantization_config": quantization} if fp8 else {}
    (directory / "config.json").write_text(json.dumps(fields))
    config: ModelConfig = config_from_directory(directory)
    tensors, held, files = {}, 0, 0
    for index, (name, shape) in enumerate(expected_tensors(config).items()):
        values = np.full(shape, 1 + index % 7, np.uint8)
        parts: dict[str, np.ndarray] = {name: values.astype(ml_dtypes.bfloat16)}
        if fp8 and name.endswith("_proj.weight"):
            scales = np.ones([-(-size // BLOCK) for size in shape], np.float32)
            parts = {name: values.view(ml_dtypes.float8_e4m3fn), name + "_scale_inv": scales}
        size = sum(part.nbytes for part in parts.values())
        if held + size > shard:
            save_file(tensors, directory / f"model-{files:05}.safetensors")
            tensors, held, files = {}, 0, files + 1
        tensors |= parts
        held += size
    save_file(tensors, directory / f"model-{files:05}.safetensors")


def measure(directory: Path) -> tuple[int, int]:
    """Bytes of the placed arrays, and by how many bytes memory grew at most."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)],
        cwd=ROOT,
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "HOME": str(directory)},
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    placed, growth = run.stdout.split()
    return int(placed), int(growth)


def check(directory: Path, *, plain: int, fp8: bool, bound: int) -> None:
    """`plain`: bytes of the arrays in bfloat16, about."""
    placed, growth = measure(directory)
    # float8 has half the bytes, scales a quarter of a bit a value; the embedding stays what it is.
    assert (0.52 * plain < placed < 0.58 * plain) if fp8 else (0.99 * plain < placed < 1.01 * plain)
    # That the measurement sees what is there: the arrays themselves.
    assert growth > 0.95 * placed
    assert growth - placed < bound, f"{(growth - placed) / 1e6:.0f} MB above {placed / 1e6:.0f} MB"


@pytest.mark.parametrize("fp8", [False, True])
def test_two_hundred_megabytes(tmp_path: Path, fp8: bool) -> None:
    """The large one at a tenth of its size."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 22, "vocab_size": 16000}
    write(tmp_path, 20_000_000, fp8=fp8, **sizes)
    check(tmp_path, plain=201_000_000, fp8=fp8, bound=70_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_two_gigabytes(tmp_path: Path, fp8: bool) -> None:
    """Shards of 200 MB; tensors of 34 MB, and an embedding of 131 MB."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 14, "vocab_size": 32000}
    write(tmp_path, 200_000_000, fp8=fp8, **sizes)
    check(tmp_path, plain=2_010_000_000, fp8=fp8, bound=700_000_000)
