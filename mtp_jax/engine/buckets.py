"""Bucketed sizes: which executables there can be, and which must be there before serving."""

import dataclasses
import enum
from collections.abc import Iterable

from mtp_jax.config import EngineConfig, power_of_two_buckets
from mtp_jax.scheduler.plan import DispatchPlan, SlotView


class Sampling(enum.IntEnum):
    """What the head must be able to do; each kind can do what the ones before it can.

    The first three decide on the host. A conditional on the device costs overlap on a GPU: the host reads
    its predicate before it launches what follows, and so runs no further ahead than one tick.
    """

    GREEDY = 0  # argmax: neither temperature nor noise
    NOISE = 1  # temperature; spread over the head's devices
    WHOLE = 2  # top-k, top-p and rejection sampling, which need whole rows of the vocabulary
    ANY = 3  # whatever the rows at hand need, by a conditional on the device
    SHAPED = 4  # and penalties, bias and masks; compiled when somebody asks for them


class Report(enum.IntEnum):
    """Which log-probabilities a step reports. Compiled when somebody asks for them."""

    NOTHING = 0
    TOKENS = 1  # those of emitted tokens
    PROMPTS = 2  # and of the tokens in prompt chunks


def sampling_of(slots: Iterable[SlotView], *, probabilistic: bool) -> Sampling:
    """What live slots ask for; `probabilistic`: drafts are sampled."""
    need = Sampling.GREEDY
    for slot in slots:
        if not slot.generation:
            continue
        if slot.shaping is not None:
            return Sampling.SHAPED
        if slot.temperature > 0:
            whole = probabilistic or slot.top_k > 0 or slot.top_p < 1
            need = max(need, Sampling.WHOLE if whole else Sampling.NOISE)
    return need


def report_of(slots: Iterable[SlotView], *, has_lane: bool) -> Report:
    """What live slots ask for."""
    need = Report.NOTHING
    for slot in slots:
        if slot.generation and has_lane and slot.prompt_logprobs is not None:
            return Report.PROMPTS
        if slot.generation and slot.logprobs is not None:
            need = Report.TOKENS
    return need


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The static sizes of one executable."""

    rounds: int  # R
    rows: int  # B: rows a group
    width: int  # W: pages of the table
    chunk: int  # C: tokens of the prefill lane; 0 without one
    drafts: int = 0  # drafts a round that are made and verified, at most the engine's K
    sampling: Sampling = Sampling.ANY
    report: Report = Report.NOTHING

    @property
    def name(self) -> str:
        """Short and unique: the name of its entry point in compile logs and profiles."""
        sizes = f"r{self.rounds}_b{self.rows}_w{self.width}_c{self.chunk}_k{self.drafts}"
        report = f"_{self.report.name.lower()}" if self.report else ""
        return f"step_{sizes}_{self.sampling.name.lower()}{report}"


def bucket_of(
    plan: DispatchPlan,
    drafts: int = 0,
    sampling: Sampling = Sampling.ANY,
    report: Report = Report.NOTHING,
) -> Bucket:
    """The bucket that a plan asks for, with these many drafts, this kind of sampling and this report."""
    chunk = plan.chunk_size if plan.has_lane else 0
    return Bucket(plan.rounds, plan.num_rows, plan.width, chunk, drafts, sampling, report)


@dataclasses.dataclass(frozen=True)
class BucketTable:
    """Sizes that executables are compiled for."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]  # pages
    chunks: tuple[int, ...]  # tokens
    rounds: tuple[int, ...]
    drafts: int  # k that everything has a fallback for
    samplings: tuple[Sampling, ...]  # ANY is always among them, and what the others fall back on

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
            drafts=config.initial_drafts,
            samplings=tuple(Sampling)[: Sampling.ANY + 1] if config.static_sampling else (Sampling.ANY,),
        )

    def first(self) -> list[Bucket]:
        """The smallest of each kind, which must be there before serving."""
        return list(dict.fromkeys(self._of_each_kind(0)))

    def fallback(self) -> list[Bucket]:
        """What any plan fits into: compiled next, so that no plan ever waits for a compiler again."""
        return [bucket for bucket in dict.fromkeys(self._of_each_kind(-1)) if bucket not in self.first()]

    def _of_each_kind(self, size: int) -> list[Bucket]:
        """With and without a lane, and for each number of rounds; `size` 0 is smallest, -1 largest."""
        rows, width, chunk = self.rows[size], self.widths[size], self.chunks[-1]
        rounds = self.rounds if size else (1, self.rounds[-1])
        plain = [Bucket(r, rows, width, 0, self.drafts) for r in rounds]
        return [*plain, Bucket(1, rows, width, chunk, self.drafts)]

    def special(self, sampling: Sampling, report: Report, *, smallest: bool) -> list[Bucket]:
        """For requests of these kinds, with a lane for prompts and without: the largest, or the smallest."""
        buckets = self.first() if smallest else list(dict.fromkeys(self._of_each_kind(-1)))
        kinds = []
        for bucket in buckets:
            of_bucket = report if bucket.chunk else min(report, Report.TOKENS)
            kinds.append(dataclasses.replace(bucket, sampling=sampling, report=of_bucket))
        return kinds

    def wider(self, bucket: Bucket) -> Bucket | None:
        """The bucket that follows when contexts outgrow this one; None for the widest."""
        larger = [width for width in self.widths if width > bucket.width]
        return dataclasses.replace(bucket, width=larger[0]) if larger else None
