"""Placed arrays on disk (Orbax): written once, and read back for the same layout without converting."""

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from mtp_jax.engine.trees import spec_of
from mtp_jax.engine.weights import WeightLayout, Weights
from mtp_jax.errors import CheckpointError, InvalidValueError, UnsupportedHereError
from mtp_jax.loading.mtp_head import MTPHead
from mtp_jax.loading.placed_dir import MARKER, SMALL_FILES, VERSION, PlacedDir
from mtp_jax.loading.safetensors_dir import SafetensorsDir
from mtp_jax.loading.source import WeightSource
from mtp_jax.models.leaves import Read, ReadScaled
from sharding.mesh import TENSOR

_TARGET, _MTP = "target", "mtp"  # folders; the second is not read where nothing is drafted
_MTP_FIELDS = ("mtp", "draft_head")


def load_weights(
    source: WeightSource,
    layout: WeightLayout,
    read_mtp: Read | None,
    report: Callable[[int, int], None],
    head: MTPHead | None = None,
) -> Weights:
    """The weights of any source: read, converted and placed, or read as they were placed before.

    `head` is where `read_mtp` reads, if it is not the source.

    Raises:
      InvalidValueError, CheckpointError: placed arrays of another layout.
    """
    if isinstance(source, PlacedDir):
        return read_placed(source, layout, report)
    mtp_names = None if head is None else head.tensors.names()
    scaled = None
    if isinstance(source, SafetensorsDir):
        scaled = ReadScaled(source.read_codes, source.read_scales)
    return layout.load(source.read, read_mtp, report, source.names(), mtp_names, scaled)


def write_placed(folder: Path, weights: Weights, layout: WeightLayout, small_files: Path) -> None:
    """Writes arrays and, last, the marker that makes the folder a model.

    Args:
      folder: exists and is empty.
      small_files: the directory with config.json and tokenizer.
    """
    require_orbax()
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        for name, tree in _parts(weights).items():
            writer.save(folder.resolve() / name, tree)
            writer.wait_until_finished()
    for name in SMALL_FILES:
        if (small_files / name).is_file():
            shutil.copyfile(small_files / name, folder / name)
    partial = folder / (MARKER + ".partial")
    partial.write_text(json.dumps(_description(layout), indent=1) + "\n")
    partial.replace(folder / MARKER)


def read_placed(source: PlacedDir, layout: WeightLayout, report: Callable[[int, int], None]) -> Weights:
    """Arrays as `write_placed` wrote them, in the places of this layout.

    Raises:
      InvalidValueError: written for another layout; names the flag.
      CheckpointError: arrays of other shapes, or unreadable ones.
    """
    require_orbax()
    check_placed(source, layout)
    import orbax.checkpoint as ocp

    def placed(shape: jax.Array, spec: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(layout.placement.mesh, spec_of(spec))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    wanted = jax.tree.map(placed, layout.shapes(), layout.specs())
    found: dict = {}
    trees = _parts(wanted)
    with ocp.StandardCheckpointer() as reader:
        for done, (name, tree) in enumerate(trees.items()):
            report(done, len(trees))
            try:
                found |= reader.restore((source.directory / name).resolve(), tree)
            except (OSError, ValueError, KeyError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                legal = "arrays of this version; `python -m mtp_jax.convert` writes them again"
                raise CheckpointError(
                    str(source.directory / name), f"unreadable ({reason})", legal
                ) from error
    report(len(trees), len(trees))
    return Weights(
        trunk=found["trunk"],
        embedding=found["embedding"],
        lm_head=found.get("lm_head"),
        final_norm=found["final_norm"],
        mtp=found.get("mtp"),
        draft_head=found.get("draft_head"),
        ngrams=found.get("ngrams"),
    )


def check_placed(source: PlacedDir, layout: WeightLayout) -> None:
    """Raises InvalidValueError where the arrays were written for another layout than this one."""
    wanted = _description(layout)
    again = f"as {source.directory} was written; `python -m mtp_jax.convert` writes others"
    for field, flag in (("stages", "--stages"), ("dtype", "--dtype")):
        if source.fields.values.get(field) != wanted[field]:
            raise InvalidValueError(flag, wanted[field], f"{source.fields.values.get(field)}, {again}")
    for like, spec in zip(jax.tree.leaves(layout.shapes()), jax.tree.leaves(layout.specs()), strict=True):
        try:
            NamedSharding(layout.placement.mesh, spec_of(spec)).shard_shape(like.shape)
        except ValueError as error:  # a float8 weight's columns share scales beyond a shard's end
            tensor = layout.placement.mesh.shape[TENSOR]
            raise InvalidValueError("--tensor", tensor, f"another number, {again}") from error
    written = source.fields.mapping("arrays").values
    for name, shape in _shapes(layout).items():
        if written.get(name) != shape:
            raise CheckpointError(
                f"{source.directory}: {name}", written.get(name), f"{shape}: convert it again"
            )
    if source.fields.values.get("layers") != wanted["layers"]:
        got = source.fields.values.get("layers")
        raise CheckpointError(f"{source.directory}: layers", got, f"{wanted['layers']}: convert it again")


def require_orbax() -> None:
    """Raises UnsupportedHereError where the package is not installed."""
    if importlib.util.find_spec("orbax") is None:
        raise UnsupportedHereError(
            "placed arrays need orbax-checkpoint; pip install 'mtp-jax[convert]' brings it"
        )


def _description(layout: WeightLayout) -> dict[str, object]:
    return {
        "version": VERSION,
        "stages": layout.plan.num_stages,
        "dtype": str(layout.dtype),
        "layers": [list(stage) for stage in layout.plan.layers],
        "mtp": layout.with_mtp,
        "draft_vocab": layout.draft_vocab,
        "float8": dict(layout.groups),
        "arrays": _shapes(layout),
    }


def _shapes(layout: WeightLayout) -> dict[str, list[int]]:
    """Path in the tree -> shape, of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(layout.shapes())
    return {jax.tree_util.keystr(path, simple=True, separator="."): list(leaf.shape) for path, leaf in leaves}


def _parts(weights: Weights) -> dict[str, dict[str, object]]:
    """Folder -> field -> arrays. Fields without arrays are left out."""
    fields = {field.name: getattr(weights, field.name) for field in dataclasses.fields(Weights)}
    there = {name: value for name, value in fields.items() if value is not None}
    target = {name: value for name, value in there.items() if name not in _MTP_FIELDS}
    mtp = {name: value for name, value in there.items() if name in _MTP_FIELDS}
    return {_TARGET: target, _MTP: mtp} if mtp else {_TARGET: target}
