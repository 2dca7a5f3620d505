"""Four processes, the programs that requests ask for, deaths of process 0, refusals, and offline use."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.running import (
    MODEL,
    ROOT,
    START_SECONDS,
    STOP_SECONDS,
    Launch,
    compile_cache,
    free_port,
    launched,
)
from tests.hosts.test_two_processes import GREEDY, PROMPTS, SEEDED, alone, texts_of

__all__ = ["alone"]
SHAPED = {"temperature": 0, "frequency_penalty": 0.5, "logprobs": 2}


@pytest.mark.slow
def test_four_processes(tmp_path: Path, alone: dict[str, list[str]]) -> None:
    """A mesh of 2 x 2; then the programs that only some requests need; then process 2 is killed."""
    with launched(tmp_path, 4, free_port(), "--stages", "2", "--tensor", "2") as launch:
        assert texts_of(launch, **GREEDY) == alone["greedy"]
        assert texts_of(launch, **SEEDED) == alone["seeded"]
        launch.kill(2)
        codes = launch.wait_ended()
        assert codes[2] == -signal.SIGKILL and (codes[0], codes[1], codes[3]) == (1, 1, 1), launch.report()
        for index in (0, 1, 3):
            assert "process 2 (" in launch.log(index) and "is gone" in launch.log(index), launch.report()


@pytest.mark.slow
def test_programs_on_demand_and_the_death_of_process_0(tmp_path: Path) -> None:
    """Penalties and log-probabilities run on programs of their own, which all processes must compile."""
    port = free_port()
    with launched(tmp_path, 2, port, "--stages", "2") as launch:
        shaped = launch.complete(PROMPTS[0], **SHAPED)["choices"][0]
        plain = launch.complete(PROMPTS[0], **GREEDY)["choices"][0]
        assert len(shaped["logprobs"]["tokens"]) == 24 and shaped["text"] != plain["text"]
        launch.kill(0)
        codes = launch.wait_ended()
        # JAX's runtime may notice before we do, and aborts.
        gone = "process 0 (127.0.0.1" in launch.log(1) or "leader task was preempted" in launch.log(1)
        assert codes[1] in (1, -signal.SIGABRT) and gone, launch.report()
    with launched(tmp_path, 2, port, "--stages", "2") as launch:
        assert launch.complete(PROMPTS[0], **SHAPED)["choices"][0]["text"] == shaped["text"]
        launch.kill(0, signal.SIGTERM)
        assert launch.wait_ended(STOP_SECONDS) == [0, 0], launch.report()


@pytest.mark.slow
def test_processes_that_would_build_different_engines(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 2, free_port(), ["--stages", "2"], {1: ["--max-num-seqs", "4"]})
    codes = launch.wait_ended(START_SECONDS)
    assert codes == [2, 2], launch.report()
    for index in (0, 1):
        assert "EngineConfig.max_num_seqs of process 1" in launch.log(index), launch.report()


@pytest.mark.slow
def test_the_same_script_offline(tmp_path: Path, alone: dict[str, list[str]]) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys
from mtp_jax import LLM, SamplingParams
sizes = dict(max_num_seqs=2, max_model_len=128, page_size=128, prefill_chunk=16, num_speculative_tokens=1)
hosts = dict(coordinator="127.0.0.1:" + sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
with LLM({str(MODEL)!r}, stages=2, use_tqdm=False, compile_cache=sys.argv[3], **sizes, **hosts) as llm:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for result in llm.generate({PROMPTS!r}, params, use_tqdm=False):
        print(repr(result.outputs[0].text))
""")
    port, cache = str(free_port()), compile_cache()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    commands = [[sys.executable, str(script), port, str(index), cache] for index in range(2)]
    processes = [
        subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in commands
    ]
    (printed, errors), (nothing, others) = (each.communicate(timeout=START_SECONDS) for each in processes)
    assert [each.wait(STOP_SECONDS) for each in processes] == [0, 0], errors + others
    # What it printed, without a line of the collectives' library.
    assert [line for line in printed.splitlines() if line[:1] in "'\""] == list(map(repr, alone["greedy"]))
    assert "'" not in nothing
