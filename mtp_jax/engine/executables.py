"""Compiled steps by bucket: a few before the engine is ready, the others when they are first wanted.

A larger bucket can always do a smaller one's work, if it makes as many drafts. So once the largest is
compiled nothing ever waits for a compiler: a plan whose own bucket is not there yet runs on the cheapest
larger one, while the exact one is compiled in the background. Nothing else is compiled that nobody asked
for: on a small machine the compiler would take the cores that the first requests need.
"""

import atexit
import collections
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import jax

from mtp_jax.engine.buckets import Bucket
from mtp_jax.engine.plan_arrays import PlanArrays
from mtp_jax.engine.state import EngineState
from mtp_jax.engine.step import Program, StepOutput
from mtp_jax.engine.weights import Weights

log = logging.getLogger(__name__)

Compiled = Callable[..., tuple[EngineState, StepOutput]]


def fits(small: Bucket, large: Bucket) -> bool:
    """Whether an executable of `large` can run a plan of `small`: alike, and no size is smaller."""
    same = small.rounds == large.rounds and (small.chunk > 0) == (large.chunk > 0)
    same &= small.drafts == large.drafts
    sizes = ("rows", "width", "chunk", "sampling", "report")
    return same and all(getattr(small, size) <= getattr(large, size) for size in sizes)


def cost(bucket: Bucket) -> tuple[int, ...]:
    """Orders buckets by the work that one tick of them is."""
    return (bucket.chunk, bucket.rows * bucket.width, bucket.rows, bucket.sampling, bucket.report)


def compiler_options() -> dict[str, bool] | None:
    """What XLA is told about every step on this process's devices."""
    if jax.default_backend() != "gpu":
        return None
    # XLA tries dozens of Triton kernels a product, which took 40 s a program; cuBLAS takes 3 to 8 s, and the
    # decode step, whose large products are kernels of our own, was 16 % faster with it.
    return {"xla_gpu_enable_triton_gemm": False}


class Executables:
    """Compiles each bucket once, and finds the cheapest compiled one for a plan. Safe from several threads.

    Args:
      program: what is compiled.
      shapes: for a bucket, the abstract (weights, state, plan) to compile for.
      background: compile missing buckets in a thread and use larger ones meanwhile; else compile at once.
      announce: called before a bucket is compiled; what it returns, afterwards, and only then is the bucket
        there. On several hosts it has the others compile too.
    """

    def __init__(
        self,
        program: Program,
        shapes: Callable[[Bucket], tuple[Weights, EngineState, PlanArrays]],
        *,
        background: bool,
        announce: Callable[[Bucket], Callable[[], None]] | None = None,
    ):
        self._program, self._shapes, self._announce = program, shapes, announce
        self._ready: dict[Bucket, Compiled] = {}
        self._locks: dict[Bucket, threading.Lock] = collections.defaultdict(threading.Lock)
        self._wanted: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._asked: set[Bucket] = set()
        self._coming: list[Bucket] = []
        self._closing = False
        self._guard = threading.Lock()  # of the counts below, and of the dictionary of locks
        self._compiling = 0
        self._failed: set[Bucket] = set()
        self._thread: threading.Thread | None = None
        self.compile_seconds: dict[Bucket, float] = {}
        if background:
            self._thread = threading.Thread(target=self._work, name="mtp-jax-compile", daemon=True)
            self._thread.start()
            # Also where nobody calls `close`: an interpreter that ends under a compiler crashes.
            atexit.register(self.close)

    def compile(self, bucket: Bucket) -> Compiled:
        """The executable of exactly this bucket, compiled now if it is not there.

        Several threads may compile different buckets at once; for one bucket the later ones wait.
        """
        with self._guard:
            lock = self._locks[bucket]
        with lock:
            if bucket not in self._ready:
                began = time.perf_counter()
                with self._guard:
                    self._compiling += 1
                try:
                    everywhere = None if self._announce is None else self._announce(bucket)
                    weights, state, plan = self._shapes(bucket)
                    lowered = self._program.step(bucket).lower(weights, state, plan)
                    compiled = lowered.compile(compiler_options())
                    if everywhere is not None:
                        everywhere()
                    self._ready[bucket] = compiled
                    self.compile_seconds[bucket] = time.perf_counter() - began
                finally:
                    with self._guard:
                        self._compiling -= 1
                log.debug("compiled %s in %.1f s", bucket, self.compile_seconds[bucket])
            return self._ready[bucket]

    @property
    def num_compiled(self) -> int:
        return len(self.compile_seconds)

    def has_failed(self, bucket: Bucket) -> bool:
        """Whether the background compiler could not compile it; it does not try again."""
        return bucket in self._failed

    @property
    def at_once(self) -> bool:
        """Whether `find` compiles what is missing, and waits for it."""
        return self._thread is None

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether exactly this bucket is compiled."""
        return bucket in self._ready

    @property
    def is_compiling(self) -> bool:
        """Whether some thread is at it: on a small machine everything else is slower then."""
        return self._compiling > 0

    def expect(self, buckets: Sequence[Bucket]) -> None:
        """Has buckets compiled next; `find` waits for one of them rather than have others compiled."""
        self._coming += [bucket for bucket in buckets if bucket not in self._coming]
        for bucket in buckets:
            self.want(bucket)

    def find(self, bucket: Bucket) -> tuple[Bucket, Compiled]:
        """The exact bucket where it is compiled, else the cheapest that fits, else compiles the exact one."""
        ready = self._ready.get(bucket)
        if ready is not None:
            return bucket, ready
        if self._thread is None:
            return bucket, self.compile(bucket)
        larger = [other for other in tuple(self._ready) if fits(bucket, other)]
        coming = [other for other in self._coming if fits(bucket, other) and other not in self._failed]
        larger = larger or coming or [bucket]
        best = min(larger, key=cost)
        if best != bucket:
            self.want(bucket)
        return best, self.compile(best)

    def want(self, bucket: Bucket) -> None:
        """Has a bucket compiled in the background, unless it is there or asked for."""
        if self._thread is not None and bucket not in self._ready and bucket not in self._asked:
            self._asked.add(bucket)
            self._wanted.put(bucket)

    def close(self) -> None:
        """Ends the background work after the compile that is under way: a compiler must not be torn down."""
        if self._thread is not None:
            atexit.unregister(self.close)
            self._closing = True  # what is still wanted is not compiled any more
            self._wanted.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (bucket := self._wanted.get()) is not None:
            if self._closing:
                continue
            try:
                self.compile(bucket)
            except Exception:
                # The engine goes on with the larger bucket; say so rather than end it.
                self._failed.add(bucket)
                log.exception("could not compile %s", bucket)
