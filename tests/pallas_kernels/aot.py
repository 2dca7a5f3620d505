"""Runs scripts that compile for chips that are not there, each in its own process; shows what they found."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent

Kernel = dict[str, object]


def run_script(script: str, *arguments: object, timeout: float) -> str:
    """Its stdout; fails with the end of its output."""
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


def compiled(script: str, *arguments: object, timeout: float = 550) -> list[Kernel]:
    """What a script printed of each kernel."""
    return [json.loads(line) for line in run_script(script, *arguments, timeout=timeout).splitlines()]


def show(title: str, kernels: Sequence[Kernel], columns: Sequence[str]) -> None:
    """Prints a Markdown table, which `make test-kernels-aot` lets through."""
    print(f"\n{title}\n\n| kernel |", *(f"{name} |" for name in columns))
    print("|---|" + "---|" * len(columns))
    for kernel in kernels:
        cells = [kernel["refused"]] if "refused" in kernel else [kernel.get(name, "") for name in columns]
        print(f"| {kernel['kernel']} |", *(f"{cell} |" for cell in cells))
