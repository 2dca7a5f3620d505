"""Who takes part: from flags, or from what started the processes (srun, mpirun, Cloud TPU, Kubernetes)."""

import importlib.util
import os
import re
import warnings
from collections.abc import Callable

from mtp_jax.errors import InvalidValueError, UnsupportedHereError
from sharding.hosts import JOIN_SECONDS, Cluster

FLAGS = "--coordinator, --num-processes and --process-id"


def find_cluster(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Cluster | None:
    """The processes that serve together; None where this one is alone.

    What is not given comes from the environment, as `jax.distributed` finds it. num_processes = 1 means
    alone, whatever the environment says.

    Raises:
      InvalidValueError: a value out of range, or one that is missing and that the environment does not tell.
      UnsupportedHereError: the environment of a cluster that does not tell who takes part.
    """
    if num_processes == 1:
        return None
    given = (coordinator, num_processes, process_id)
    local_device_ids = None
    if None in given:
        found = _detect()
        if found is None and given == (None, None, None):
            return None
        known = found or Cluster("", 0, -1)
        coordinator = coordinator or known.coordinator or None
        num_processes = num_processes or known.num_processes or None
        if process_id is None and found is not None:
            process_id = known.process_id
        local_device_ids = known.local_device_ids
    _check("--coordinator", coordinator, "HOST:PORT of process 0", _is_address)
    _check("--num-processes", num_processes, "how many processes there are", lambda count: count > 1)
    assert coordinator is not None and num_processes is not None
    last = num_processes - 1
    _check("--process-id", process_id, f"0 to {last}, another in every process", lambda i: 0 <= i <= last)
    assert process_id is not None
    return Cluster(coordinator, num_processes, process_id, local_device_ids)


def _check[T](flag: str, value: T | None, legal: str, is_legal: Callable[[T], bool]) -> None:
    if value is None or not is_legal(value):
        legal += f" ({FLAGS} go together)" if value is None else ""
        raise InvalidValueError(flag, value, legal)


def _is_address(text: str) -> bool:
    match = re.fullmatch(r"(?:[^:\[\]\s]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", text)
    return match is not None and 1 <= int(match[1]) <= 65535


def _detect() -> Cluster | None:
    """What the environment says; None where it does not speak of several processes."""
    if not _looks_like_a_cluster():
        return None
    from jax._src.clusters import ClusterEnv  # jax.distributed has no way to ask without joining

    try:
        with warnings.catch_warnings(record=True) as said:
            found = ClusterEnv.auto_detect_unset_distributed_params(
                None, None, None, None, None, JOIN_SECONDS
            )
    except Exception as error:  # whatever a cluster's API answers
        reason = " ".join(str(error).split())
        text = f"the environment does not tell which processes there are ({reason}); give {FLAGS}"
        raise UnsupportedHereError(text) from error
    coordinator, num_processes, process_id, local_device_ids = found
    if said and coordinator is None:
        reason = " ".join(str(said[0].message).split())
        raise UnsupportedHereError(f"{reason} Or give {FLAGS}; --num-processes 1 is a process alone.")
    if coordinator is None or num_processes is None or process_id is None or num_processes < 2:
        return None
    ids = None if local_device_ids is None or _one_process_a_host() else tuple(local_device_ids)
    return Cluster(coordinator, num_processes, process_id, ids)


def _looks_like_a_cluster() -> bool:
    """Whether it pays to ask JAX, which may ask a cluster's API.

    A batch script outside of `srun`, or a lone pod, has some of a cluster's variables too.
    """
    count = os.environ.get
    if int(count("SLURM_STEP_NUM_TASKS", "1")) > 1 or int(count("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return True
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        return True
    on_tpu = "tpu" in os.environ.get("JAX_PLATFORMS", "tpu")
    return on_tpu and importlib.util.find_spec("libtpu") is not None


def _one_process_a_host() -> bool:
    """Then it gets all of its host's devices; JAX would give it one only, under SLURM and Open MPI."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 1(x4),2
    counts = {part.partition("(")[0] for part in tasks.split(",")}
    return counts == {"1"} or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
