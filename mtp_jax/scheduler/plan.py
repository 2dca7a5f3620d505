"""What the host tells the device before a dispatch, and what it reads back: the scheduler's two data types.

A *dispatch* runs `rounds` rounds of the ring, that is `rounds * Z` ticks. Tick numbers inside a
dispatch start at 0, and every dispatch starts with group 0 about to enter stage 0, so at tick t
stage s works on group (t - s) mod Z and group (t + 1) mod Z leaves the last stage. A prefill
chunk given for tick t enters stage 0 at tick t and leaves the last stage at tick t + Z - 1, which
may lie in the next dispatch.

Replicas (the data axis) go through the same ticks, each with groups and a prefill lane of its own. Slots are
numbered through all of them, replica by replica; pages within each.
"""

import dataclasses

from mtp_jax.request import SamplingParams, TokenLogprobs

DEVICE_STOP_TOKENS = 8  # stop tokens of a slot that the device watches for; the host checks them all


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a prompt that enters the prefill lane at one tick."""

    slot: int
    generation: int
    start: int  # position of the first token
    token_ids: tuple[int, ...]
    next_token: (
        int  # the prompt token after the chunk; -1 where the chunk ends the prompt and the model samples it
    )

    @property
    def is_final(self) -> bool:
        return self.next_token < 0


@dataclasses.dataclass(frozen=True)
class Shaping:
    """What changes a request's logits before temperature, as of its entry into a slot."""

    params: SamplingParams
    num_prompt_tokens: int
    token_ids: tuple[int, ...]  # prompt, and, after a preemption, what was emitted before it
    stop_token_ids: tuple[int, ...]  # all of them, end-of-sequence included
    bad_word_ids: tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class SlotView:
    """One request slot as the device should see it during a dispatch.

    `generation` changes with every request (and every preemption): work in flight that carries
    another one is dropped on the device, and writes nothing. 0 means that the slot is free.
    """

    generation: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)  # page ids, in position order
    max_total: int = 0  # tokens, prompt and completion, at which the request is finished
    num_drafts: int = 0  # drafts a round for this request, 0..K
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence and stop tokens that the device watches for
    shaping: Shaping | None = None  # None: the model's logits as they are
    logprobs: int | None = None  # alternatives to report of each token; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt


@dataclasses.dataclass(frozen=True)
class DispatchPlan:
    """One dispatch. Bucketed sizes (`num_rows`, `width`, `chunk_size`) choose the executable."""

    index: int  # counts dispatches
    rounds: int  # R
    rows: tuple[tuple[int, ...], ...]  # Z groups a replica, of num_rows entries: slots, -1 where empty
    slots: tuple[SlotView, ...]  # every slot of the engine; read it before the scheduler runs again
    chunks: tuple[Chunk | None, ...]  # one per tick (rounds * Z) of each replica if has_lane, else empty
    num_rows: int  # rows a group; covers this plan's rows and the previous plan's, whose flights still arrive
    width: int  # pages: columns of the page table; covers every slot that is live or in flight
    chunk_size: int  # tokens: width of the prefill lane; covers the chunks in flight too. 0 without a lane
    has_lane: bool  # chunks enter, or are still in flight, during this dispatch


@dataclasses.dataclass(frozen=True)
class RowResult:
    """Tokens that one row produced at one tick, in tick order.

    The device has already cut them after a stop token and at `max_total`.
    """

    slot: int
    generation: int
    token_ids: tuple[int, ...]  # 1 to K + 1 of them
    num_drafts: int  # drafts that were verified for them; 0 for the first token after a prompt
    num_accepted: int  # of these, accepted (before any cut)
    logprobs: tuple[TokenLogprobs, ...] = ()  # of token_ids, one each, where asked for
    proposals: tuple[int, ...] = ()  # the drafts after them, where the step reports these


@dataclasses.dataclass(frozen=True)
class TokenUpdate:
    """New tokens of one request, for the front end."""

    request_id: str
    token_ids: tuple[int, ...]
    num_drafts: int
    num_accepted: int
    is_first: bool  # the first token after the prompt (or after a preemption's recompute)
    finish_reason: str | None = None  # a FinishReason value
    stop_token: int | None = None  # the stop token that ended it, the last of token_ids
    logprobs: tuple[TokenLogprobs, ...] = ()  # of token_ids, one each, where asked for
    proposals: tuple[int, ...] = ()  # drafts that the next round may verify, where the step reports them
