"""Bucketed sizes: which executables there can be, and which must be there before serving."""

import dataclasses

from mtp_jax.config import EngineConfig, power_of_two_buckets
from mtp_jax.scheduler.plan import DispatchPlan


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static sizes of one executable."""

    rounds: int  # R
    rows: int  # B: rows a group
    width: int  # W: pages of the table
    chunk: int  # C: tokens of the prefill lane; 0 without one


def bucket_of(plan: DispatchPlan) -> Bucket:
    """The bucket that a plan asks for."""
    return Bucket(plan.rounds, plan.num_rows, plan.width, plan.chunk_size if plan.has_lane else 0)


@dataclasses.dataclass(frozen=True)
class BucketTable:
    """Sizes that executables are compiled for."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]  # pages
    chunks: tuple[int, ...]  # tokens
    rounds: tuple[int, ...]

    @classmethod
    def of(cls, config: EngineConfig) -> "BucketTable":
        least = -(-config.min_table_tokens // config.page_size)
        return cls(
            rows=power_of_two_buckets(config.min_rows, config.rows_per_group, factor=4),
            widths=power_of_two_buckets(
                min(least, config.pages_per_slot), config.pages_per_slot, factor=config.table_growth
            ),
            chunks=power_of_two_buckets(min(16, config.prefill_chunk), config.prefill_chunk, factor=4),
            rounds=power_of_two_buckets(1, config.max_rounds),
        )

    def first(self) -> list[Bucket]:
        """What must be there before serving: the smallest, for a quick start, and what any plan fits into."""
        rows, width, chunk = self.rows, self.widths, self.chunks
        small = [Bucket(r, rows[0], width[0], 0) for r in dict.fromkeys((1, self.rounds[-1]))]
        small.append(Bucket(1, rows[0], width[0], chunk[-1]))
        large = [Bucket(1, rows[-1], width[-1], 0), Bucket(1, rows[-1], width[-1], chunk[-1])]
        rounds = [Bucket(r, rows[-1], width[-1], 0) for r in self.rounds[1:]]
        return list(dict.fromkeys([*small, *large, *rounds]))

    def wider(self, bucket: Bucket) -> Bucket | None:
        """The bucket that follows when contexts outgrow this one; None for the widest."""
        larger = [width for width in self.widths if width > bucket.width]
        return dataclasses.replace(bucket, width=larger[0]) if larger else None
