"""Several processes as one machine, on JAX's own runtime: joining it, and placing arrays there."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

HEARTBEAT_SECONDS = 10  # a process that JAX's coordinator has not heard of for so long is dead; JAX says 100
JOIN_SECONDS = 300  # for all processes to come
SHUTDOWN_SECONDS = 10  # that those who end in good order wait for one another


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Which process this is, of how many. The same `coordinator` in all of them."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None  # None: all that there are

    @property
    def host(self) -> str:
        """Of process 0, as sockets want it: an IPv6 address without brackets."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """JAX's coordinator listens here."""
        return int(self.coordinator.rpartition(":")[2])

    @property
    def plan_port(self) -> int:
        """Process 0 gives plans to the others here: the port after the coordinator's, 65534 for the last."""
        return self.port + 1 if self.port < 65535 else self.port - 1


def join(cluster: Cluster) -> None:
    """Makes the devices of all processes visible in each. To be called in all, before JAX's first use."""
    ids = cluster.local_device_ids
    # Its handler of SIGTERM would take the place of ours, which ends all processes in good order.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=None if ids is None else list(ids),
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )


def check_everybody_takes_part(mesh: Mesh) -> None:
    """Raises ValueError where some process has no device in the mesh: it could not run the same programs."""
    present = {device.process_index for device in mesh.devices.flat}
    absent = sorted(set(range(jax.process_count())) - present)
    if absent:
        raise ValueError(
            f"a mesh with a device of every process; {mesh.devices.size} of {jax.device_count()} devices "
            f"leave process {', '.join(map(str, absent))} without one"
        )


def place(tree: Any, shardings: Any) -> Any:
    """Host arrays on devices; every process has the whole of each and puts its own shards.

    Args:
      tree: arrays, or a pytree of them.
      shardings: one for all, or a pytree like `tree`.

    `device_put` to devices of several processes would compare the values across all of them first, which
    waits for whatever runs there.
    """
    if isinstance(shardings, Sharding):
        one = shardings
        shardings = jax.tree.map(lambda _: one, tree)
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    return jax.tree.map(
        lambda array, sharding: jax.make_array_from_callback(array.shape, sharding, lambda i: array[i]),
        tree,
        shardings,
    )
