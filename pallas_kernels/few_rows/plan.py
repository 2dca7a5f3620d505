"""How a product of a few rows is cut into blocks, warpgroups and chunks."""

import dataclasses
from typing import Literal

import jax

from pallas_kernels.hopper import NUM_SMS, SMEM_BYTES

MAX_ROWS = 64  # rows of a wgmma
LINE = 64  # bfloat16s of a swizzled line
CHUNKS = (192, 128, 64)  # of the contraction, in the order of preference
MAX_BARRIERS = 32  # in one array of them
ROW_GROUP = 8  # rows of a swizzled tile
COLUMN_GROUP = 8  # columns of a wgmma come in whole ones

Kind = Literal["rope", "add", "swiglu"]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut; None: chosen from the shapes.

    `columns` of each part of the weights go to a block, `warpgroups` share its contraction in chunks;
    `row_stages` and `weight_stages` of them are in flight for each.
    """

    columns: int | None = None
    warpgroups: int | None = None
    chunk: int | None = None
    row_stages: int | None = None
    weight_stages: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A product's static sizes. Weights are [heads, parts, width, in]; a block takes `columns` of `width`."""

    kind: Kind
    rows: int
    contraction: int
    heads: int
    parts: int
    width: int
    columns: int
    warpgroups: int
    chunk: int
    row_stages: int
    weight_stages: int
    eps: float = 0.0
    rotated: tuple[int, int] = (0, 0)  # of each group of [1] heads the first [0] are rotated
    has_bias: bool = False

    @property
    def chunks(self) -> int:
        """Chunks of each warpgroup."""
        return self.contraction // self.chunk // self.warpgroups

    @property
    def grid(self) -> tuple[int, int]:
        return self.width // self.columns, self.heads

    @property
    def padded_rows(self) -> int:
        """What a copy of rows moves; TMA leaves out those behind the last."""
        return -(-self.rows // ROW_GROUP) * ROW_GROUP


def make_plan(kind: Kind, x: jax.Array, weight: jax.Array, tuning: Tuning) -> Plan:
    heads, parts, width, contraction = weight.shape
    columns = tuning.columns or _choose_columns(heads, width)
    # Above 48 columns of sums four warpgroups would not have registers for them.
    most = 4 if parts * columns <= 48 else 2
    lines = contraction // LINE
    warpgroups = tuning.warpgroups or max(n for n in range(1, most + 1) if lines % n == 0)
    chunk = tuning.chunk or next(n for n in CHUNKS if lines // warpgroups % (n // LINE) == 0)
    each = contraction // chunk // warpgroups
    row_bytes, weight_bytes = 2 * MAX_ROWS * chunk * warpgroups, 2 * columns * chunk * parts * warpgroups
    # What is left of shared memory after sums, output and small operands.
    space = SMEM_BYTES - 8 * 1024 - (warpgroups + 1) * parts * columns * MAX_ROWS * 4
    row_stages = tuning.row_stages or min(each, max(1, 192 // chunk))
    weight_stages = (space - row_stages * row_bytes) // weight_bytes
    weight_stages = tuning.weight_stages or max(1, min(each, weight_stages, MAX_BARRIERS // warpgroups))
    return Plan(
        kind=kind,
        rows=x.shape[0],
        contraction=contraction,
        heads=heads,
        parts=parts,
        width=width,
        columns=columns,
        warpgroups=warpgroups,
        chunk=chunk,
        row_stages=row_stages,
        weight_stages=weight_stages,
    )


def _choose_columns(heads: int, width: int) -> int:
    """As few as can be, with all blocks on the chip at once."""
    legal = [n for n in range(COLUMN_GROUP, min(width, 64) + 1, COLUMN_GROUP) if width % n == 0]
    return next((n for n in legal if heads * width // n <= NUM_SMS), legal[-1])
