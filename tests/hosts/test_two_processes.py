"""Two processes serve one model through the real command line: same tokens, ends in good order, no hang."""

import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtp_jax.llm import LLM
from mtp_jax.request import SamplingParams
from tests.hosts.running import MODEL, STOP_SECONDS, free_port, launched

PROMPTS = [list(range(3, 40)), list(range(50, 60)), [7, 8, 9]]
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[str]]:
    """Texts of one process on one device."""
    llm = LLM(
        MODEL,
        num_speculative_tokens=1,
        max_num_seqs=1,
        max_model_len=128,
        page_size=128,
        prefill_chunk=16,
        use_tqdm=False,
    )
    with llm:
        texts = {}
        for name, values in (("greedy", GREEDY), ("seeded", SEEDED)):
            params = SamplingParams(max_tokens=24, ignore_eos=True, **values)
            results = llm.generate(PROMPTS, params, use_tqdm=False)
            texts[name] = [result.outputs[0].text for result in results]
    return texts


def texts_of(launch, **body: object) -> list[str]:
    """Answers to all prompts, asked at the same time."""
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        found[index] = launch.complete(PROMPTS[index], **body)["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(PROMPTS))]


@pytest.mark.slow
def test_two_processes(tmp_path: Path, alone: dict[str, list[str]]) -> None:
    """One launch after the other at the same ports, for starting is what takes time here."""
    port = free_port()
    with launched(tmp_path, 2, port, "--stages", "2") as launch:
        assert texts_of(launch, **GREEDY) == alone["greedy"]
        assert texts_of(launch, **SEEDED) == alone["seeded"]
        # A process that is told to stop has all of them end in good order.
        launch.kill(1, signal.SIGTERM)
        assert launch.wait_ended(STOP_SECONDS) == [0, 0], launch.report()
        assert "was told to stop (SIGTERM)" in launch.log(0)
        assert "process 0 has ended" in launch.log(1)

    with launched(tmp_path, 2, port, "--stages", "2") as launch:
        assert launch.complete(PROMPTS[0], **GREEDY)["choices"][0]["text"] == alone["greedy"][0]
        pid = launch.processes[1].pid
        launch.kill(1)
        codes = launch.wait_ended()
        assert codes[0] == 1 and f"pid {pid}) is gone; stopping" in launch.log(0), launch.report()
    with pytest.raises(httpx.ConnectError):
        httpx.get(launch.url + "/health")
