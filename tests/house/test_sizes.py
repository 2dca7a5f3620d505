"""Files and functions stay small enough to read; every module says what it is."""

import ast

import pytest

from tests.house.source import Module, product_modules

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_file_is_short(module: Module) -> None:
    lines = module.text.count("\n")
    assert lines <= MAX_FILE_LINES, f"{module.path.name} has {lines} lines; split it"


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_functions_fit_a_screen(module: Module) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{module.name}.{node.name} has {lines} lines; split it"


@pytest.mark.parametrize("module", product_modules(), ids=lambda module: module.name)
def test_module_has_a_docstring(module: Module) -> None:
    assert ast.get_docstring(module.tree), f"{module.name} does not say what it is"
