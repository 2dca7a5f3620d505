"""What devices say to each other at a tick, counted in the compiled program."""

import dataclasses
import re
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from mtp_jax.config import ModelConfig
from mtp_jax.engine.buckets import Bucket
from tests.parity.rig import TINY, RandomSource, blueprint, compile_bucket
from tests.plan.test_draw import OF_FAMILIES

TWO_LAYERS = dataclasses.replace(TINY, num_hidden_layers=2)
KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str
    crosses: bool  # between replicas
    in_entry: bool  # once a dispatch; else in the loop over ticks


def collectives(text: str, tensor: int, data: int) -> Iterator[Collective]:
    """Of the text of a compiled program on a mesh with so many shards and replicas."""
    in_entry = False
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%?\S+ \(", line):
            in_entry = line.startswith("ENTRY")
        found = re.search(rf" ({KINDS})(-start)?\(", line)
        if found:
            named = re.search(r"replica_groups=mesh\[.*?\] ?\{(.*?)\}", line)
            if named:  # such as mesh['stage'=2,'data'=2,'tensor'=1] {'stage','tensor'}
                crosses = data > 1 and "'data'" in named[1]
            else:
                crosses = any(len({device // tensor % data for device in g}) > 1 for g in _groups(line))
            yield Collective(found[1], crosses, in_entry)


def _groups(line: str) -> Iterator[tuple[int, ...]]:
    """replica_groups={{0,2},{1,3}}, the same as [2,2]<=[2,2]T(1,0), or source_target_pairs."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line)
    if listed:
        for group in re.findall(r"\{([\d,]+)\}", listed[1]):
            yield tuple(map(int, group.split(",")))
        return
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert iota, line
    shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
    assert shape is not None and dims is not None
    ids = np.arange(np.prod(dims)).reshape(dims)
    yield from map(tuple, (ids if order is None else ids.transpose(order)).reshape(shape).tolist())


def compiled(model: ModelConfig, layout: tuple[int, int, int], chunk: int, k: int) -> jax.stages.Compiled:
    stages, tensor, data = layout
    sizes = {"max_num_seqs": 2 * stages * data, "num_speculative_tokens": k}
    drawn = blueprint(RandomSource(model), stages=stages, tensor=tensor, data=data, **sizes)
    return compile_bucket(drawn, Bucket(1, 2, drawn.config.pages_per_slot, chunk, k))


@pytest.mark.parametrize(
    ("name", "layout", "chunk", "k"),
    [
        ("dense", (2, 1, 2), 16, 0),
        pytest.param("dense", (2, 2, 2), 16, 3, marks=pytest.mark.slow),
        pytest.param("dense", (2, 1, 2), 0, 3, marks=pytest.mark.slow),
        pytest.param("tiny_glm_moe_dsa", (2, 1, 2), 16, 1, marks=pytest.mark.slow),  # indices travel, too
        pytest.param("tiny_qwen3_next", (2, 2, 1), 16, 1, marks=pytest.mark.slow),
    ],
)
def test_a_tick(name: str, layout: tuple[int, int, int], chunk: int, k: int) -> None:
    """One message to the next stage, whatever it carries; and no replica ever waits for another one."""
    model = TWO_LAYERS if name == "dense" else OF_FAMILIES[name]
    _, tensor, data = layout
    text = compiled(model, layout, chunk, k).as_text()
    assert text is not None
    found = list(collectives(text, tensor, data))
    in_tick = [one for one in found if not one.in_entry]
    assert [one.kind for one in in_tick].count("collective-permute") == 1
    assert not any(one.crosses for one in in_tick)
    crossing = sorted(one.kind for one in found if one.crosses)
    assert crossing == (["all-gather", "all-reduce"] if data > 1 else []), "results and a counter"
    print(f"{name} {layout}: {len(in_tick)} collectives a tick")
