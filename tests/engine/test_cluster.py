"""Who takes part: flags, and the environments of srun and mpirun."""

import pytest

from mtp_jax.engine.cluster import find_cluster
from mtp_jax.errors import InvalidValueError
from sharding.hosts import Cluster

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[07-10]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}


@pytest.fixture(autouse=True)
def _outside_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SLURM, "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def slurm(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in (SLURM | changes).items():
        monkeypatch.setenv(name, value)


def test_flags() -> None:
    assert find_cluster(None, None, None) is None
    assert find_cluster("node:1234", 2, 1) == Cluster("node:1234", 2, 1)
    cluster = find_cluster("[fe80::1]:1234", 2, 0)
    assert cluster is not None and (cluster.host, cluster.port, cluster.plan_port) == ("fe80::1", 1234, 1235)
    assert Cluster("node:65535", 2, 0).plan_port == 65534


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (("node:1234", 2, None), "--process-id"),
        (("node:1234", None, 0), "--num-processes"),
        ((None, 2, 0), "--coordinator"),
        (("node", 2, 0), "--coordinator"),
        (("node:70000", 2, 0), "--coordinator"),
        (("http://node:1", 2, 0), "--coordinator"),
        (("node:1234", 2, 2), "--process-id"),
    ],
)
def test_refused(given: tuple[str | None, int | None, int | None], field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        find_cluster(*given)
    assert caught.value.field == field


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch)
    found = find_cluster(None, None, None)
    assert found is not None and (found.num_processes, found.process_id) == (4, 2)
    assert found.host == "node07" and found.local_device_ids is None  # all of the host's
    assert find_cluster(None, 1, None) is None
    chosen = find_cluster("other:99", None, None)
    assert chosen == Cluster("other:99", 4, 2)


def test_slurm_with_a_process_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch, SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2(x2)")
    found = find_cluster(None, None, None)
    assert found is not None and found.local_device_ids == (1,)


def test_a_batch_script_outside_of_srun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(monkeypatch)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert find_cluster(None, None, None) is None
