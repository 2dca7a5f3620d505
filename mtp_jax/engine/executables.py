"""Compiled steps by bucket: a few before the engine is ready, the others in the background.

A larger bucket can always do a smaller one's work. So once the largest is compiled nothing ever waits
for a compiler: a plan whose own bucket is not there yet runs on the next larger one that is.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

import jax

from mtp_jax.engine.plan_arrays import Bucket
from mtp_jax.engine.state import EngineState
from mtp_jax.engine.step import Program, StepOutput
from mtp_jax.engine.weights import Weights

log = logging.getLogger(__name__)

Compiled = Callable[..., tuple[EngineState, StepOutput]]


def fits(small: Bucket, large: Bucket) -> bool:
    """True where an executable of `large` can run a plan of `small`: same rounds and lane, no smaller size."""
    same = small.rounds == large.rounds and (small.chunk > 0) == (large.chunk > 0)
    return same and small.rows <= large.rows and small.width <= large.width and small.chunk <= large.chunk


def cost(bucket: Bucket) -> tuple[int, int, int]:
    """Orders buckets by the work that one tick of them is."""
    return (bucket.chunk, bucket.rows * bucket.width, bucket.rows)


class Executables:
    """Compiles each bucket once, and finds the cheapest compiled one for a plan. Safe from several threads."""

    def __init__(self, program: Program, shapes: Callable[[Bucket], tuple[Weights, EngineState, object]]):
        self._program = program
        self._shapes = shapes
        self._ready: dict[Bucket, Compiled] = {}
        self._lock = threading.Lock()
        self._wanted: list[Bucket] = []
        self._background: threading.Thread | None = None
        self._closed = False
        self.compile_seconds: dict[Bucket, float] = {}

    def compile(self, bucket: Bucket) -> Compiled:
        """The executable of exactly this bucket, compiled now if it is not there."""
        with self._lock:
            if bucket not in self._ready:
                began = time.perf_counter()
                weights, state, plan = self._shapes(bucket)
                self._ready[bucket] = self._program.step(bucket).lower(weights, state, plan).compile()
                self.compile_seconds[bucket] = time.perf_counter() - began
                log.debug("compiled %s in %.1f s", bucket, self.compile_seconds[bucket])
            return self._ready[bucket]

    def find(self, bucket: Bucket) -> tuple[Bucket, Compiled]:
        """The exact bucket where it is compiled, else the cheapest that fits, else compiles the exact one."""
        ready = self._ready.get(bucket)
        if ready is not None:
            return bucket, ready
        larger = [other for other in tuple(self._ready) if fits(bucket, other)]
        if not larger:
            return bucket, self.compile(bucket)
        best = min(larger, key=cost)
        return best, self._ready[best]

    def compile_in_background(self, buckets: Iterable[Bucket]) -> None:
        """Starts a thread that compiles these, in order, while the engine serves."""
        self._wanted = list(buckets)
        self._background = threading.Thread(target=self._run, name="mtp-jax-compile", daemon=True)
        self._background.start()

    def close(self) -> None:
        """Ends the background work after the compile that is under way: a compiler must not be torn down."""
        self._closed = True
        if self._background is not None:
            self._background.join()

    def _run(self) -> None:
        for bucket in self._wanted:
            if self._closed:
                return
            try:
                self.compile(bucket)
            except jax.errors.JaxRuntimeError:
                # The engine goes on with the larger bucket; say so rather than end it.
                log.exception("could not compile %s", bucket)
