"""The soak itself, over the scripted engine: it passes on a right server and notices wrong ones."""

import dataclasses

import pytest

from benchmarks.http_soak import soak
from mtp_jax.request import RequestOutput
from tests.server.running import local_server
from tests.server.scripted import ScriptedBackend, ScriptedEngine

FLAGS = ("--num-speculative-tokens", "2", "--max-num-seqs", "4", "--num-pages", "256")


def test_soak_passes() -> None:
    with local_server(*FLAGS, backend=ScriptedBackend(step_seconds=0.002)) as server:
        report = soak(server.url)
    assert report.failures == ()
    assert report.aborted > 5 and report.requests == 200 and report.acceptance_rate is not None


class _Overbilling(ScriptedEngine):
    """Hands out one token more than max_tokens allows."""

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        return [
            dataclasses.replace(output, token_ids=(*output.token_ids, 65)) if output.finish_reason else output
            for output in outputs
        ]


class _Leaking(ScriptedEngine):
    """Keeps a page of every request that ends. (Whether a client leaves in time to be aborted is chance.)"""

    leaked = 0

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        self.leaked += sum(output.finish_reason is not None for output in outputs)
        return outputs

    def stats(self):
        return dataclasses.replace(super().stats(), kv_cache_usage=self.leaked / 256)


class _Unsteady(ScriptedEngine):
    """The text depends on what else runs."""

    def step(self) -> list[RequestOutput]:
        crowd = self.stats().num_running > 1
        return [dataclasses.replace(o, text=o.text.upper() if crowd else o.text) for o in super().step()]


@pytest.mark.parametrize(
    ("kind", "words"),
    [(_Overbilling, "completion tokens"), (_Leaking, "kv_cache_usage_perc"), (_Unsteady, "alone")],
)
def test_soak_notices(kind: type[ScriptedEngine], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.server.scripted.ScriptedEngine", kind)
    monkeypatch.setattr("benchmarks.http_soak.IDLE_SECONDS", 0.5)
    with local_server(*FLAGS, backend=ScriptedBackend(step_seconds=0.002)) as server:
        report = soak(server.url, count=60)
    assert any(words in failure for failure in report.failures), report.failures
