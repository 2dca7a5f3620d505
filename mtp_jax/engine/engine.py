"""The engine's host loop: schedule, dispatch, read the dispatch before, hand out text."""

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from mtp_jax.config import EngineConfig, ModelConfig
from mtp_jax.engine.adaptive import DraftChooser
from mtp_jax.engine.buckets import Bucket, BucketTable, Sampling, bucket_of, report_of, sampling_of
from mtp_jax.engine.executables import Compiled, Executables
from mtp_jax.engine.guided import Grammars
from mtp_jax.engine.leader import Leader
from mtp_jax.engine.on_demand import OnDemand
from mtp_jax.engine.orders import Launch
from mtp_jax.engine.outputs import Completion, failed_output
from mtp_jax.engine.plan_arrays import (
    PlanArrays,
    PlanChanges,
    PlanWriter,
    PromptResult,
    number_slots,
    read_prompt_results,
    read_results,
)
from mtp_jax.engine.shaping_slots import (
    Installation,
    ShapingSlots,
    bad_word_tokens,
    check_something_is_left,
)
from mtp_jax.engine.shaping_state import ShapingState
from mtp_jax.engine.state import EngineState, with_shaping
from mtp_jax.engine.stats import Counts, EngineStats
from mtp_jax.engine.step import StepOutput
from mtp_jax.engine.weights import Weights
from mtp_jax.errors import InvalidRequestError, NotCompiledError
from mtp_jax.request import EngineRequest, GrammarSpec, RequestOutput
from mtp_jax.scheduler.plan import DispatchPlan, TokenUpdate
from mtp_jax.scheduler.scheduler import Scheduler
from mtp_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NOT_COMPILED = "the step that this request needs could not be compiled; the server's log says why"
HELD_SECONDS = 0.005  # between two looks for an executable that everybody waits for


@dataclasses.dataclass(frozen=True)
class Launched:
    """A dispatch that the device has been given and the host has not read.

    `times` says that how long it takes tells something: it was launched before the one ahead of it was
    read, on its own executable, with requests that go on, no prompt in the ring and no compiler beside it.
    """

    plan: DispatchPlan
    output: Future[StepOutput]
    bucket: Bucket
    ticks: int
    times: bool
    num_compiled: int  # executables there were


class Engine:
    """Serves requests; driven by one thread through `step`. Built by `engine.build.build_engine`."""

    def __init__(
        self,
        model_name: str,
        model_config: ModelConfig,
        config: EngineConfig,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        executables: Executables,
        buckets: BucketTable,
        writer: PlanWriter,
        shaping: ShapingSlots,
        grammars: Grammars,
        weights: Weights,
        state: EngineState,
        leader: Leader | None = None,  # of the other processes, in process 0 of several
    ):
        self.model_name, self.model_config, self.config, self.tokenizer = (
            model_name,
            model_config,
            config,
            tokenizer,
        )
        self.executables, self._buckets = executables, buckets
        self._scheduler, self._writer = scheduler, writer
        self._weights, self._state, self._leader = weights, state, leader
        self._shaping, self._on_demand = shaping, OnDemand(executables, buckets)
        self._grammars = grammars
        # A thread of its own: a launch on a GPU is 1,500 kernels and 2 ms of a host that has more to do.
        self._launcher = ThreadPoolExecutor(1, "mtp-jax-launch")
        self._unread: collections.deque[Launched] = collections.deque()
        self._completions: dict[str, Completion] = {}
        self._counts = Counts(config.num_speculative_tokens)
        self._chooser: DraftChooser | None = None
        if config.adaptive_drafts and config.num_speculative_tokens:
            self._chooser = DraftChooser(config.num_speculative_tokens, config.initial_drafts, buckets.rows)
        self._read_at = 0.0  # when the last dispatch was read
        self._broken: BaseException | None = None  # what a launch died of: the state went with it

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises InvalidRequestError for one that can never be served."""
        request = self._checked(request)
        if request.request_id in self._completions:
            legal = "an id that no unfinished request has"
            raise InvalidRequestError("request_id", request.request_id, legal)
        self._scheduler.check(request)
        if request.params.structured_outputs is not None:
            self._grammars.add(request.request_id, request.params.structured_outputs)
        if not self._on_demand.must_wait(request):
            self._scheduler.add(request)
        self._completions[request.request_id] = Completion(request, self.tokenizer, time.monotonic())

    def _checked(self, request: EngineRequest) -> EngineRequest:
        """The request with its bad words as tokens."""
        params, size = request.params, self.model_config.vocab_size
        for token in (min(request.prompt_token_ids, default=0), max(request.prompt_token_ids, default=0)):
            if not 0 <= token < size:  # a tokenizer may know more than the model
                raise InvalidRequestError("prompt", f"token id {token}", f"0 to {size - 1}")
        params.check_token_ids(size)
        bad_words = bad_word_tokens(params, self.tokenizer)
        stop = params.end_token_ids(self.model_config.eos_token_ids)
        check_something_is_left(params, bad_words, stop, size)
        return dataclasses.replace(request, bad_word_ids=bad_words) if bad_words else request

    def abort(self, request_id: str) -> bool:
        """Ends a request at once, without an output; False where it is not known (any more)."""
        self._completions.pop(request_id, None)
        self._grammars.forget(request_id)
        held = self._on_demand.forget(request_id)
        return self._scheduler.finish(request_id) or held

    def compile_grammar(self, spec: GrammarSpec) -> None:
        """Has a grammar compiled ahead of its request; any thread may call it.

        Raises:
          InvalidRequestError: it is none, or too large, or takes too long.
        """
        self._grammars.compile(spec)

    def has_work(self) -> bool:
        """True while a request is unfinished or a dispatch is unread."""
        return self._scheduler.has_unfinished or bool(self._unread) or self._on_demand.num_held > 0

    def _admit_held(self) -> list[RequestOutput]:
        """Hands requests whose executables have come to the scheduler; ends those that cannot have any."""
        if not self._on_demand.num_held:
            return []
        for request in self._on_demand.release():
            self._scheduler.add(request)
        failed = self._on_demand.take_failed()
        for request in failed:
            del self._completions[request.request_id]
            self._grammars.forget(request.request_id)
        if not (self._scheduler.has_unfinished or self._unread):
            time.sleep(HELD_SECONDS)  # nothing else to do than wait for a compiler
        return [failed_output(request.request_id, NotCompiledError(NOT_COMPILED)) for request in failed]

    def step(self) -> list[RequestOutput]:
        """Launches the next dispatch, then reads the one before: the host works while the device does."""
        try:
            return self._step()
        except Exception as error:
            self._broken = self._broken or error
            raise

    def _step(self) -> list[RequestOutput]:
        outputs = self._admit_held()
        began = time.perf_counter()
        plan = self._scheduler.schedule()
        for request_id in self._scheduler.take_admitted():
            self._completions[request_id].admitted(time.monotonic())
        if plan is not None:
            self._unread.append(self._launch(plan))
        self._counts.host_seconds += time.perf_counter() - began
        # More than one is left to read after a Ctrl-C in here.
        while len(self._unread) > (plan is not None):
            outputs += self._collect()
        if self._unread and not self._scheduler.has_unfinished:
            # Nothing is in it, and whoever drives the engine may read it after a pause.
            self._unread.append(dataclasses.replace(self._unread.pop(), times=False))
        return outputs

    def _launch(self, plan: DispatchPlan) -> Launched:
        exact = self._bucket(plan)
        bucket, step = self.executables.find(exact)
        self._look_ahead(plan, exact)
        changes, pending = self._writer.changes(plan, bucket), self._shaping.pending(plan.slots)
        if bucket.sampling is Sampling.SHAPED:
            guided = self._grammars.masks(plan.slots, self._scheduler.request_in, bucket.drafts)
            changes = dataclasses.replace(changes, guided=guided)
        arrays = self._arrays(changes, bucket)
        output = self._launcher.submit(self._launch_everywhere, step, arrays, changes, bucket, pending)
        alike = bool(self._unread) and self._unread[-1].bucket == bucket == exact and not bucket.chunk
        times = alike and not self.executables.is_compiling
        ticks = plan.rounds * self.config.stages
        return Launched(plan, output, bucket, ticks, times, self.executables.num_compiled)

    def _launch_everywhere(
        self,
        step: Compiled,
        plan: PlanArrays,
        changes: PlanChanges,
        bucket: Bucket,
        pending: Sequence[Installation],
    ) -> StepOutput:
        """`_run`, and the same in the other processes. Whatever a step gets must be in the order to them."""
        installations = self._shaping.on_host(pending)
        if self._leader is not None and self._broken is None:
            self._leader.launch(Launch(bucket, changes, installations))
        return self._run(step, plan, bucket, installations)

    def follow(self, order: Launch) -> StepOutput:
        """Launches what process 0 launches; all that an engine does in the other processes."""
        step, arrays = self.executables.compile(order.bucket), self._arrays(order.changes, order.bucket)
        return self._run(step, arrays, order.bucket, order.installations)

    def _arrays(self, changes: PlanChanges, bucket: Bucket) -> PlanArrays:
        """Sends the changes of a dispatch; the arrays of its step."""
        arrays = self._writer.apply(changes, bucket)
        if bucket.sampling is not Sampling.SHAPED:
            return arrays
        return dataclasses.replace(arrays, masks=self._grammars.place(changes.guided, bucket.drafts))

    def _run(
        self,
        step: Compiled,
        plan: PlanArrays,
        bucket: Bucket,
        installations: Sequence[tuple[int, ShapingState]],
    ) -> StepOutput:
        """Hands a step to the device; only the launcher's thread touches the state."""
        if self._broken is not None:  # say what was first, not that the state is gone
            raise self._broken
        try:
            if bucket.sampling is not Sampling.SHAPED:
                self._state, output = step(self._weights, self._state, plan)
                return output
            self._shaping.install(installations)
            state, output = step(self._weights, with_shaping(self._state, self._shaping.state), plan)
            self._shaping.state, self._state = state.slots.shaping, with_shaping(state, None)
        except BaseException as error:
            self._broken = error
            raise
        return output

    def _bucket(self, plan: DispatchPlan) -> Bucket:
        """The bucket that suits a plan best."""
        safe = self._buckets.drafts
        if self._chooser is None:
            return self._bucket_with(plan, safe)
        offered = max((slot.num_drafts for slot in plan.slots if slot.generation), default=0)
        if self._grammars.num_live:  # nothing overlaps then, so nothing is timed: no trial would end
            drafts = self._chooser.best(plan.num_rows, offered)
        else:
            drafts = self._chooser.choose(plan.num_rows, offered)
        bucket = self._bucket_with(plan, drafts)
        if bucket.drafts == safe or self.executables.at_once or self.executables.is_ready(bucket):
            return bucket
        if self.executables.has_failed(bucket):
            self._chooser.cannot(bucket.rows, bucket.drafts)
        self.executables.want(bucket)  # until then with as many drafts as there is a fallback for
        return self._bucket_with(plan, safe)

    def _bucket_with(self, plan: DispatchPlan, drafts: int) -> Bucket:
        probabilistic = drafts > 0 and self.config.draft_sampling == "probabilistic"
        need = sampling_of(plan.slots, probabilistic=probabilistic)
        report = report_of(plan.slots, has_lane=plan.has_lane)
        if report and self.config.logprobs_mode == "processed":
            need = max(need, Sampling.WHOLE)
        kinds = (*self._buckets.samplings, Sampling.SHAPED)
        return bucket_of(plan, drafts, min(kind for kind in kinds if kind >= need), report)

    def _look_ahead(self, plan: DispatchPlan, bucket: Bucket) -> None:
        """Has the next wider bucket compiled once a context fills half of this one."""
        longest = max((len(slot.pages) for slot in plan.slots if slot.generation), default=0)
        wider = self._buckets.wider(bucket)
        if wider is not None and 2 * longest > bucket.width:
            self.executables.want(wider)

    def _collect(self) -> list[RequestOutput]:
        """Reads the oldest dispatch."""
        launched = self._unread[0]
        output = jax.device_get(launched.output.result())  # waits for the device
        self._unread.popleft()
        began = time.perf_counter()
        self._time(launched, began)
        packed, slots = number_slots(np.asarray(output.results), self.config), launched.plan.slots
        for result in read_prompt_results(packed, launched.bucket, slots):
            self._note_prompt(result)
        results = read_results(packed, launched.bucket, slots)
        updates = self._scheduler.update(launched.plan, results)
        self._counts.dispatched(launched.plan, launched.ticks, int(output.useful))
        outputs = [output for update in updates if (output := self._deliver(update)) is not None]
        self._counts.host_seconds += time.perf_counter() - began
        return outputs

    def _time(self, launched: Launched, now: float) -> None:
        """Tells the chooser what a dispatch took, and the log what it made of it."""
        before, self._read_at = self._read_at, now
        if self._chooser is None or not launched.times or self.executables.is_compiling:
            return
        if self.executables.num_compiled != launched.num_compiled:
            return  # a compiler was at work in between
        bucket = launched.bucket
        self._chooser.timed(bucket.rows, bucket.drafts, (now - before) / bucket.rounds)
        for choice in self._chooser.take_decided():
            log.info("speculation: %s", choice.describe())

    def _note_prompt(self, result: PromptResult) -> None:
        request_id = self._scheduler.request_in(result.slot, result.generation)
        completion = self._completions.get(request_id) if request_id is not None else None
        if completion is not None:
            completion.note_prompt(result.position, result.logprobs)

    def _deliver(self, update: TokenUpdate) -> RequestOutput | None:
        self._counts.delivered(update)
        if self._chooser is not None and update.num_drafts:
            self._chooser.verified(update.num_drafts, update.num_accepted)
        completion = self._completions.get(update.request_id)
        if completion is None:  # a stop string ended it earlier in this very dispatch
            return None
        output = completion.push(update, self._scheduler.num_cached_tokens(update.request_id))
        problem = self._grammars.advance(update, ended=output.finish_reason is not None)
        if problem is not None:
            output = failed_output(update.request_id, problem)
        if output.finish_reason is not None:
            del self._completions[update.request_id]
            self._grammars.forget(update.request_id)
            self._on_demand.forget(update.request_id)
            if update.finish_reason is None:  # a stop string, which only the host sees
                self._scheduler.finish(update.request_id)
        return output

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""
        scheduler, counts = self._scheduler, self._counts
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._on_demand.num_held,
            is_compiling=self.executables.is_compiling,
            kv_cache_usage=scheduler.pages_used / scheduler.pages_total,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_drafts=counts.drafted_rounds,
            num_draft_tokens=counts.draft_tokens,
            num_accepted_tokens=sum(counts.accepted_per_position),
            num_accepted_per_position=tuple(counts.accepted_per_position),
            drafts_in_use=self._chooser.in_use() if self._chooser is not None else {},
            ticks=counts.ticks,
            useful_ticks=counts.useful_ticks,
            host_seconds_per_dispatch=counts.host_seconds / max(counts.dispatches, 1),
            prompt_tokens=counts.prompt_tokens,
            generation_tokens=counts.generation_tokens,
        )

    def close(self) -> None:
        """Waits for the device and the background compiler, and lets go of both. Ends the other processes."""
        if self._leader is not None and self._broken is not None:
            self._leader.fail(f"process 0 failed: {self._broken!r}")
        unread = list(self._unread)
        self._unread.clear()
        try:
            for launched in unread:
                jax.block_until_ready(launched.output.result())
        finally:
            self._launcher.shutdown()
            self.executables.close()
            if self._leader is not None:
                self._leader.end()
