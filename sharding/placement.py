"""The placement table: logical axes of weights, caches and state to mesh axes.

Models and the engine name *logical* axes; this table alone says which mesh axis each one lies on.
The trunk is split over `stage` (layers) and `tensor` (heads, ffn columns). The head - embedding,
LM head, MTP module - is not on the last stage: it is spread over `stage` x `tensor`, so that every
stage does its share of verification and drafting (see ARCHITECTURE.md). Weights are whole in every
replica of `data`, but for axes that a placement shares among replicas; requests, that is slots, pages and
flights, are split over it.
"""

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from sharding.mesh import AXES, DATA, STAGE, TENSOR

MeshAxes = str | tuple[str, ...] | None

LOGICAL_AXES: dict[str, MeshAxes] = {
    "replica": DATA,  # slots, pages and flights, those of one replica behind those of another
    "layer_stage": STAGE,  # leading axis of stacked trunk weights, caches and flights
    "kv_heads": TENSOR,  # trunk attention, grouped by KV head
    "key_heads": TENSOR,  # of gated delta nets
    "heads": TENSOR,  # query heads of latent attention, whose cached rows all devices have
    "ffn": TENSOR,
    "experts": TENSOR,
    "vocab": (STAGE, TENSOR),  # rows of the embedding and of the LM head
    "ngram_parts": (STAGE, TENSOR),  # of the table of hashed n-grams
    "mtp_kv_heads": (STAGE, TENSOR),
    "mtp_heads": (STAGE, TENSOR),
    "mtp_experts": (STAGE, TENSOR),
    "mtp_ffn": (STAGE, TENSOR),
    "mtp_out": (STAGE, TENSOR),  # output features of the MTP input projection
}
HEAD_AXES = (STAGE, TENSOR)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table bound to one mesh, with the logical axes that do not divide there left replicated."""

    mesh: Mesh | AbstractMesh  # abstract: only shapes and places are asked for
    replicated: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()  # logical axes that are spread over replicas, too

    def axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that a logical axis lies on, the slowest first; none where it is replicated."""
        if logical in self.replicated:
            return ()
        axes = LOGICAL_AXES[logical]
        names = (axes,) if isinstance(axes, str) else axes or ()
        return (DATA, *names) if logical in self.shared else names

    def axis_size(self, logical: str) -> int:
        """Devices that a logical axis is spread over: 1 where it is replicated."""
        return math.prod(self.mesh.shape[name] for name in self.axes(logical))

    def spec(self, *logical: str | None) -> P:
        """PartitionSpec for an array whose axes have these logical names (None: not split).

        Raises:
          ValueError: two axes of the array would land on one mesh axis.
        """
        entries = [() if name is None else self.axes(name) for name in logical]
        used = [axis for entry in entries for axis in entry]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {logical} use a mesh axis twice: {entries}")
        return P(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def make_placement(
    mesh: Mesh | AbstractMesh, sizes: dict[str, int], shared: frozenset[str] = frozenset()
) -> Placement:
    """Binds the table to a mesh; an axis of `sizes` that its mesh axes do not divide is replicated."""
    assert set(mesh.axis_names) == set(AXES)
    whole = Placement(mesh, shared=shared)
    replicated = frozenset(name for name, size in sizes.items() if size % whole.axis_size(name))
    return Placement(mesh, replicated, shared)
