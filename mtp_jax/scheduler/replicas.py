"""Replicas of the data axis: the slots and pages of each, and which one a request goes to."""

import dataclasses
import heapq

from mtp_jax.config import EngineConfig
from mtp_jax.scheduler.pages import PagePool
from mtp_jax.scheduler.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a request could start: a replica, the pages that it would share, and how many it would take."""

    replica: int
    matched: list[int]
    missing: int


class Replicas:
    """Slots and pages, replica by replica. Slots are numbered through all of them, pages within one.

    A request stays where it is: its cache lies on that replica's devices. One that was preempted has no
    cache, and may go anywhere.

    Attributes:
      pools: the pages of each replica.
    """

    def __init__(self, config: EngineConfig):
        caching, replicas = config.enable_prefix_caching, range(config.data)
        self._size = config.slots_per_replica
        self.pools = [
            PagePool(config.num_pages, config.page_size, enable_prefix_caching=caching) for _ in replicas
        ]
        self._free = [list(range(i * self._size, (i + 1) * self._size)) for i in replicas]  # heaps
        self._uneven = max(1, self._size // 4)

    def of(self, slot: int) -> int:
        """The replica of a slot."""
        return slot // self._size

    def pool(self, sequence: Sequence) -> PagePool:
        """The pages of a running request's replica."""
        return self.pools[self.of(sequence.slot)]

    def running(self, replica: int) -> int:
        """How many requests it has."""
        return self._size - len(self._free[replica])

    @property
    def num_held(self) -> int:
        """Pages that requests hold, of all replicas."""
        return sum(pool.num_held for pool in self.pools)

    @property
    def num_pages(self) -> int:
        return sum(pool.num_pages for pool in self.pools)

    def take_slot(self, replica: int) -> int:
        """The lowest free slot."""
        return heapq.heappop(self._free[replica])

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free[self.of(slot)], slot)

    def choose(self, tokens: list[int], total: int, *, match: bool) -> Place | None:
        """Where to start a request: where most of its prompt is cached, then where fewest others run.

        All replicas go through the same ticks, as many rows high as the fullest one needs. So a prefix
        draws requests only to a replica that has little more of them than the emptiest.

        Args:
          tokens: of the request so far.
          total: positions that it needs pages for.
          match: whether it may share cached pages.

        Returns:
          None where no replica has a slot and the pages.
        """
        places = [place for i in range(len(self.pools)) if (place := self._place(i, tokens, total, match))]
        if not places:
            return None
        most = min(self.running(place.replica) for place in places) + self._uneven

        def merit(place: Place) -> tuple[int, int, int]:
            running, pool = self.running(place.replica), self.pools[place.replica]
            return len(place.matched) if running <= most else 0, -running, pool.num_available

        return max(places, key=merit)

    def _place(self, replica: int, tokens: list[int], total: int, match: bool) -> Place | None:
        """What starting here would take, if it is there."""
        if not self._free[replica]:
            return None
        pool = self.pools[replica]
        matched = pool.match(tokens) if match else []
        missing = pool.pages_for(total) - len(matched)
        available = pool.num_available - pool.num_idle(matched)
        # One page for each running request stays free: without this, a request that was preempted
        # comes back at once and is preempted again.
        return Place(replica, matched, missing) if missing + self.running(replica) <= available else None
