"""What the documents say is what the code does: flags, presets, files, the ring's timetable."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mtp_jax.config import EngineConfig
from tests.house.source import ROOT

README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PRESETS = sorted((ROOT / "configs").glob("*.toml"))
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


@pytest.fixture(scope="module")
def help_text() -> str:
    run = subprocess.run(
        [sys.executable, "-m", "mtp_jax.serve", "--help"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "1000"},  # a help text a line
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout


def _section(document: str, heading: str) -> str:
    """The text under `## heading`, up to the next heading of that level."""
    return document.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def _table_rows(text: str) -> list[list[str]]:
    """Cells of a Markdown table's body rows; the first table of `text`."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _entries(help_text: str) -> list[str]:
    """The help text's entries, each from its flag to the end of its description."""
    return [entry.split("\n\n")[0].strip() for entry in re.split(r"\n  (?=-)", help_text)]


def test_flag_table_lists_every_flag(help_text: str) -> None:
    documented = {match for row in _table_rows(_section(README, "Flags")) for match in FLAG.findall(row[0])}
    assert documented == set(FLAG.findall(help_text)) - {"--help"}


def test_flag_table_has_the_defaults(help_text: str) -> None:
    documented = {row[0].strip("`"): row[1].strip("`") for row in _table_rows(_section(README, "Flags"))}
    entries = (
        re.match(r"(--[a-z-]+)\b.*\(default: (.*?)\)$", entry, re.DOTALL) for entry in _entries(help_text)
    )
    defaults = {entry[1]: entry[2] for entry in entries if entry}
    del defaults["--compile-cache"]  # a path of this machine
    assert len(defaults) > 15
    assert {flag: documented[flag] for flag in defaults} == defaults


def test_commands_use_flags_that_exist(help_text: str) -> None:
    commands = [
        line
        for document in (*DOCUMENTS, *PRESETS)
        for line in document.read_text().splitlines()
        if re.search(r"mtp_jax\.serve --|mtp-jax serve --|make serve .*ARGS=", line)
    ]
    assert commands
    for line in commands:
        assert set(FLAG.findall(line)) <= set(FLAG.findall(help_text)), line


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_use_flags_that_exist(preset: Path, help_text: str) -> None:
    settings = tomllib.loads(preset.read_text())
    assert {"--" + key.replace("_", "-") for key in settings} <= set(FLAG.findall(help_text))
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    EngineConfig(**{key: value for key, value in settings.items() if key in names})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("name", re.findall(r"^\| `([\w/]+(?:\.py|/))`", ARCHITECTURE, re.MULTILINE))
def test_architecture_names_files_that_exist(name: str) -> None:
    assert (ROOT / name).exists()


def test_the_timetable_follows_the_rule_of_the_ring() -> None:
    """Stage s works on group (t - s) mod Z at tick t; group (t + 1) mod Z leaves the last stage."""
    rows = _table_rows(_section(ARCHITECTURE, "The ring").split("timetable", 1)[1])
    num_stages = 2
    assert len(rows) == num_stages + 1
    for stage, row in enumerate(rows[:num_stages]):
        assert row[1:] == [f"group {(tick - stage) % num_stages}" for tick in range(len(row) - 1)]
    assert rows[-1][1:] == [f"group {(tick + 1) % num_stages}" for tick in range(len(rows[-1]) - 1)]


def test_notebooks_are_valid_and_hold_no_output() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert cells
        for cell in cells:
            if cell["cell_type"] == "code":
                assert not cell["outputs"] and cell["execution_count"] is None, path.name
                source = "".join(cell["source"])
                if not source.startswith(("%", "!")):
                    compile(source, str(path), "exec")


def test_documents_do_not_promise_numbers_nobody_measured() -> None:
    assert "TO BE FILLED" not in "".join(path.read_text() for path in DOCUMENTS)
