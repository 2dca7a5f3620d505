"""The product's files, parsed: what the house tests look at."""

import ast
import dataclasses
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mtp_jax", "pallas_kernels", "sharding")


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file. `name` is dotted; a package's `__init__` has the package's name."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def imports(self) -> frozenset[str]:
        """Dotted names of everything imported anywhere in the file, inside functions too."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = self.name.split(".")
                    if self.path.name != "__init__.py":
                        package = package[:-1]
                    package = package[: len(package) - node.level + 1]
                    base = ".".join([*package, *filter(None, [base])])
                names.add(base)
                names.update(f"{base}.{alias.name}" for alias in node.names)
        return frozenset(names)


def _parse(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    text = path.read_text()
    return Module(".".join(parts), path, text, ast.parse(text, str(path)))


@functools.cache
def product_modules() -> tuple[Module, ...]:
    """Every module that is installed with the product."""
    return tuple(_parse(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))


@functools.cache
def all_modules() -> tuple[Module, ...]:
    """The product and its tests."""
    return (*product_modules(), *map(_parse, sorted((ROOT / "tests").rglob("*.py"))))
