"""Requests that need a kind of step which is compiled only when somebody asks for it.

They wait outside the scheduler until it is there, so that nobody else does: a live request's kind is every
dispatch's kind, and a dispatch whose kind is missing would stand still for a compiler.
"""

from collections.abc import Iterable

from mtp_jax.engine.buckets import Bucket, BucketTable, Report, Sampling
from mtp_jax.engine.executables import Executables
from mtp_jax.request import EngineRequest, SamplingParams

Kind = tuple[Sampling, Report]
PLAIN: Kind = (Sampling.ANY, Report.NOTHING)


def kind_of(params: SamplingParams) -> Kind:
    """What a request needs at least, of the kinds that can serve its neighbours whatever they ask for."""
    report = Report.NOTHING if params.logprobs is None else Report.TOKENS
    if params.prompt_logprobs is not None:
        report = Report.PROMPTS
    return Sampling.SHAPED if params.shapes_logits else Sampling.ANY, report


def union(kinds: Iterable[Kind]) -> Kind:
    """The kind that serves all of them together."""
    sampling, report = PLAIN
    for kind in kinds:
        sampling, report = max(sampling, kind[0]), max(report, kind[1])
    return sampling, report


class OnDemand:
    """Knows the kinds of live requests, and holds back those whose kind is not compiled."""

    def __init__(self, executables: Executables, buckets: BucketTable):
        self._executables, self._buckets = executables, buckets
        self._live: dict[str, Kind] = {}  # requests that the scheduler has and that are not plain
        self._held: dict[str, EngineRequest] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def must_wait(self, request: EngineRequest) -> bool:
        """Takes note of a request that goes to the scheduler now (False), or holds it back (True)."""
        kind = kind_of(request.params)
        if kind == PLAIN:
            return False
        if not self._may_go(kind):
            self._held[request.request_id] = request
            return True
        self._live[request.request_id] = kind
        return False

    def forget(self, request_id: str) -> bool:
        """A request has ended. Returns whether it was held back."""
        self._live.pop(request_id, None)
        return self._held.pop(request_id, None) is not None

    def release(self) -> list[EngineRequest]:
        """Requests that may go to the scheduler now, in their order."""
        released = []
        for request_id, request in tuple(self._held.items()):
            kind = kind_of(request.params)
            if self._may_go(kind):
                del self._held[request_id]
                self._live[request_id] = kind
                released.append(request)
        return released

    def take_failed(self) -> list[EngineRequest]:
        """Requests whose kind could not be compiled; they are held no longer."""
        failed = [r for r in self._held.values() if any(map(self._executables.has_failed, self._every(r)))]
        for request in failed:
            del self._held[request.request_id]
        return failed

    def _every(self, request: EngineRequest) -> list[Bucket]:
        kind = union([*self._live.values(), kind_of(request.params)])
        return self._buckets.special(*kind, smallest=False)

    def _may_go(self, kind: Kind) -> bool:
        """Whether any plan with this kind of request and all live ones finds an executable.

        The largest ones fit all. Smaller ones would do for a request that comes alone, until another joins it
        or its plan has more rounds: then everybody would wait. They come next, for they are faster.
        """
        together = union([*self._live.values(), kind])
        if self._executables.at_once or together == union(self._live.values()):
            return True
        needed = self._buckets.special(*together, smallest=False)
        for bucket in [*needed, *self._buckets.special(*together, smallest=True)]:
            self._executables.want(bucket)
        return all(map(self._executables.is_ready, needed))
