"""What the host knows about one request, and the checks a request passes before it is queued."""

import dataclasses
import functools

from mtp_jax.config import EngineConfig
from mtp_jax.errors import InvalidRequestError
from mtp_jax.request import EngineRequest, FinishReason
from mtp_jax.scheduler.pages import ROOT
from mtp_jax.scheduler.plan import DEVICE_STOP_TOKENS, Shaping, SlotView

NEAR_GREEDY = 1e-5  # temperatures below it only overflow; their distribution is the greedy one


@dataclasses.dataclass(eq=False)
class Sequence:
    """One request on the host.

    `tokens` are prompt and completion as far as they were read back. The fields from `slot` on
    describe one stay in a slot, which a preemption ends.
    """

    request: EngineRequest
    tokens: list[int]
    max_total: int  # tokens, prompt and completion, at which it is finished
    num_drafts: int
    stop_token_ids: tuple[int, ...]  # all of them, end-of-sequence included
    arrival: int  # counts requests
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache had when it was first admitted
    was_admitted: bool = False

    slot: int = -1
    generation: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    num_entered: int = 0  # tokens matched in the cache or put into chunks
    num_computed: int = 0  # positions whose KV the host knows to be written
    num_registered: int = 0  # pages offered to the prefix cache
    parent: int = ROOT  # serial of the last of these
    exit_plan: int | None = (
        None  # index of the plan in which the final chunk leaves the ring; None before it enters
    )
    has_new_token: bool = False  # a token was read back in this stay

    @functools.cached_property
    def _stops(self) -> frozenset[int]:
        """The stop tokens: there may be as many as the vocabulary has."""
        return frozenset(self.stop_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def is_guided(self) -> bool:
        """It has a grammar: what a round may emit is known only when the round before has been read."""
        return self.request.params.structured_outputs is not None

    @property
    def is_decoding(self) -> bool:
        """The final chunk has entered the ring, so the slot has a row."""
        return self.exit_plan is not None

    def view(self) -> SlotView:
        """The device's view. It shares `pages`, so growth shows in later plans."""
        params = self.request.params
        return SlotView(
            generation=self.generation,
            pages=self.pages,
            max_total=self.max_total,
            num_drafts=self.num_drafts,
            temperature=params.temperature if params.temperature >= NEAR_GREEDY else 0.0,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            seed=self.request.seed,
            stop_token_ids=self.stop_token_ids[:DEVICE_STOP_TOKENS],
            shaping=self._shaping() if params.shapes_logits else None,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def _shaping(self) -> Shaping:
        request = self.request
        return Shaping(
            request.params,
            self.num_prompt_tokens,
            tuple(self.tokens),
            self.stop_token_ids,
            request.bad_word_ids,
        )

    def enter_slot(
        self,
        *,
        slot: int,
        generation: int,
        pages: list[int],
        num_matched: int,
        num_registered: int,
        parent: int,
    ) -> None:
        """Begins a stay; `num_matched` tokens come from the prefix cache, the rest goes into chunks."""
        self.slot, self.generation, self.pages = slot, generation, pages
        self.num_entered = self.num_computed = num_matched
        self.num_registered, self.parent = num_registered, parent
        self.exit_plan, self.has_new_token = None, False

    def leave_slot(self) -> None:
        """Ends a stay; tokens are kept."""
        self.slot, self.generation, self.pages = -1, 0, []
        self.num_computed = 0

    def cut(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """New tokens up to the first that ends the request, and why it ends there."""
        if self.request.params.max_tokens == 0:
            return (), FinishReason.LENGTH
        room = self.max_total - len(self.tokens)
        for count, token in enumerate(token_ids[:room], start=1):
            if token in self._stops:
                return token_ids[:count], FinishReason.STOP
        if len(token_ids) >= room:
            return token_ids[:room], FinishReason.LENGTH
        return token_ids, None


def make_sequence(
    request: EngineRequest, config: EngineConfig, eos_token_ids: tuple[int, ...], arrival: int
) -> Sequence:
    """Host state of a request that the engine can serve.

    Raises:
      InvalidRequestError: it could never run, whatever else runs; names the parameter to change.
    """
    params, prompt = request.params, request.prompt_token_ids
    drafts, most_drafts = params.num_speculative_tokens, config.num_speculative_tokens
    if drafts is not None and drafts > most_drafts:
        legal = f"0 to {most_drafts}, the drafts a round that this server was started with"
        raise InvalidRequestError("num_speculative_tokens", drafts, legal)
    return Sequence(
        request=request,
        tokens=list(prompt),
        max_total=_max_total(request, config),
        num_drafts=most_drafts if drafts is None else drafts,
        stop_token_ids=params.end_token_ids(eos_token_ids),
        arrival=arrival,
    )


def _max_total(request: EngineRequest, config: EngineConfig) -> int:
    """Most tokens, prompt and completion, of a request; raises where it cannot be served."""
    prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens
    if wanted == 0:  # one is made, and not told
        wanted = 1
    context, pool = config.max_model_len, config.num_pages * config.page_size
    if not prompt:
        raise InvalidRequestError("prompt", "no tokens", "at least one token")
    if prompt > context - 1:
        legal = f"at most {context - 1} tokens, one less than the model's context of {context}"
        raise InvalidRequestError("prompt", f"{prompt} tokens", legal)
    if wanted is not None and prompt + wanted > context:
        legal = f"at most {context - prompt} after a prompt of {prompt} tokens in a context of {context}"
        raise InvalidRequestError("max_tokens", wanted, legal)
    if prompt + (wanted or 1) > pool:
        needed = -(-(prompt + (wanted or 1)) // config.page_size)
        field, got = ("max_tokens", wanted) if prompt < pool else ("prompt", f"{prompt} tokens")
        legal = (
            f"a request that fits in {config.num_pages} KV pages of {config.page_size} tokens, and this one "
            f"needs {needed}: shorten the prompt, lower max_tokens, or serve with a larger --num-pages"
        )
        raise InvalidRequestError(field, got, legal)
    return min(context, pool) if wanted is None else prompt + wanted
