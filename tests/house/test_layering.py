"""Imports point one way, the host side needs no JAX, and nothing needs torch."""

import subprocess
import sys

import pytest

from tests.house.source import ROOT, Module, all_modules, product_modules

# A unit may import units of lower layers, and itself.
LAYERS = (
    ("mtp_jax.errors",),
    ("mtp_jax.config", "mtp_jax.request", "mtp_jax.shapes", "mtp_jax.progress"),
    ("mtp_jax.scheduler", "mtp_jax.text", "sharding", "pallas_kernels"),
    ("mtp_jax.models",),
    ("mtp_jax.loading",),
    ("mtp_jax.engine",),
    ("mtp_jax.llm", "mtp_jax.server"),
    ("mtp_jax.train", "mtp_jax.chat", "mtp_jax.bench", "mtp_jax.plan", "mtp_jax.convert"),
    ("mtp_jax.serve", "mtp_jax.cli", "mtp_jax"),
    ("mtp_jax.__main__",),
)
WITHOUT_JAX = (
    "mtp_jax.errors",
    "mtp_jax.config",
    "mtp_jax.request",
    "mtp_jax.scheduler",
    "mtp_jax.text",
)
JAX_ONLY = ("sharding", "pallas_kernels")


def _unit(name: str) -> str:
    """The layer table's entry that a dotted name belongs to: its package, or its top-level module."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "mtp_jax" else parts[0]


def _layer(unit: str) -> int:
    for height, units in enumerate(LAYERS):
        if unit in units:
            return height
    raise AssertionError(f"{unit} has no layer: add it to LAYERS in {__file__} and to ARCHITECTURE.md")


def _internal_units(module: Module) -> set[str]:
    """Units of this project that `module` imports; names imported from a package are not units themselves."""
    names = {other.name for other in product_modules()} - {"mtp_jax"}
    return {_unit(name) for name in module.imports & names}


def _top_level(module: Module) -> set[str]:
    return {name.split(".")[0] for name in module.imports}


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_imports_point_one_way(module: Module) -> None:
    unit = _unit(module.name)
    for imported in _internal_units(module) - {unit}:
        assert _layer(imported) < _layer(unit), f"{module.name} may not import {imported}"


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_names_come_from_the_module_that_defines_them(module: Module) -> None:
    """`from mtp_jax import LLM` is for users; inside, it would hide a dependence on every layer."""
    if module.name != "mtp_jax":
        assert not module.imports & {"mtp_jax.LLM", "mtp_jax.SamplingParams"}


def test_the_host_side_names_no_jax() -> None:
    heavy = {"jax", "jaxlib", "flax", "sharding", "pallas_kernels"}
    for module in product_modules():
        if _unit(module.name) in WITHOUT_JAX:
            assert not _top_level(module) & heavy, module.name


def test_sharding_and_kernels_import_jax_only() -> None:
    allowed = {"jax", "jaxlib", "numpy", "ml_dtypes"} | set(sys.stdlib_module_names)
    for module in product_modules():
        if _unit(module.name) in JAX_ONLY:
            assert _top_level(module) <= allowed | {_unit(module.name)}, module.name


def test_nothing_imports_torch() -> None:
    """Only the scripts that make golden files may; they run in an environment of their own."""
    for module in all_modules():
        if not module.name.startswith("tests.oracle"):
            assert not _top_level(module) & {"torch", "torchvision"}, module.name


def _modules_loaded_by(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    return set(run.stdout.split())


def test_the_host_side_runs_without_jax() -> None:
    loaded = _modules_loaded_by("\n".join(f"import {name}" for name in WITHOUT_JAX))
    assert "mtp_jax.scheduler" in loaded
    assert not loaded & {"jax", "flax"}


def test_the_server_loads_no_torch() -> None:
    loaded = _modules_loaded_by("import mtp_jax.serve, mtp_jax.llm")
    assert "mtp_jax.engine" in loaded
    assert "torch" not in loaded
