"""From tokens to what clients see: detokenizing, stop strings and acceptance, per request."""

import collections
from collections.abc import Sequence

from mtp_jax.request import EngineRequest, FinishReason, RequestOutput, SpeculationStats, TokenLogprobs
from mtp_jax.scheduler.plan import TokenUpdate
from mtp_jax.text.detokenizer import Detokenizer
from mtp_jax.text.stop import StopChecker
from mtp_jax.text.tokenizer import Tokenizer


class DraftMarks:
    """Which characters came from accepted drafts, through a hold that lets text out in order, later.

    Text goes in as tokens make it (`push`) and leaves as it is shown (`take`).
    """

    def __init__(self):
        self._runs: collections.deque[tuple[int, bool]] = collections.deque()  # characters, accepted

    def push(self, num_characters: int, accepted: bool) -> None:
        """A token made this much text."""
        if num_characters:
            self._runs.append((num_characters, accepted))

    def take(self, num_characters: int) -> tuple[tuple[int, int], ...]:
        """The oldest characters leave: half-open ranges of them that came from accepted drafts."""
        spans: list[tuple[int, int]] = []
        done = 0
        while done < num_characters:
            length, accepted = self._runs.popleft()
            taken = min(length, num_characters - done)
            if taken < length:
                self._runs.appendleft((length - taken, accepted))
            if accepted and spans and spans[-1][1] == done:
                spans[-1] = (spans[-1][0], done + taken)
            elif accepted:
                spans.append((done, done + taken))
            done += taken
        return tuple(spans)


def failed_output(request_id: str, problem: Exception) -> RequestOutput:
    """The last output of a request that cannot be answered."""
    return RequestOutput(request_id, finish_reason=FinishReason.ABORT, error=problem)


class Completion:
    """The text of one request as it grows. Times are `time.monotonic()` seconds."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, arrived: float):
        params = request.params
        self._arrived = arrived
        self._queued_seconds: float | None = None  # until it is told
        self._request, self._tokenizer = request, tokenizer
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = (
            StopChecker(params.stop, keep=params.include_stop_str_in_output) if params.stop else None
        )
        self._accepted: collections.Counter[int] = collections.Counter()
        self._num_drafts = 0
        self._rounds: list[int] = []  # drafts accepted by each round that had any
        self._marks = DraftMarks()
        self._num_tokens = 0
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}  # by position, until they are told

    def note_prompt(self, position: int, logprobs: TokenLogprobs) -> None:
        """A prompt token's log-probability; a recompute after preemption tells nothing new."""
        if not self._num_tokens:  # what is computed again has been told
            self._prompt_logprobs.setdefault(position, self._with_data(logprobs))

    def _with_data(self, entry: TokenLogprobs) -> TokenLogprobs:
        data = self._tokenizer.token_text.data
        top = tuple(
            TokenLogprobs(other.token_id, other.logprob, (), data(other.token_id)) for other in entry.top
        )
        return TokenLogprobs(entry.token_id, entry.logprob, top, data(entry.token_id))

    def admitted(self, now: float) -> None:
        """The request got its slot (for the first time: preemption does not count again)."""
        self._queued_seconds = now - self._arrived

    def push(self, update: TokenUpdate, num_cached_tokens: int) -> RequestOutput:
        """Takes new tokens. A `finish_reason` in the result says that the request is over.

        Tokens of one round are taken one by one, so that a stop string inside it drops the later ones.
        """
        if update.num_drafts:
            self._accepted[update.num_accepted] += 1
            self._num_drafts += update.num_drafts
            self._rounds.append(update.num_accepted)
        reason = FinishReason(update.finish_reason) if update.finish_reason else None
        ends_here = reason is FinishReason.STOP  # by the last of these tokens
        stop_reason: int | str | None = None  # stays None for the model's own end-of-sequence token
        if ends_here and update.stop_token in self._request.params.stop_token_ids:
            stop_reason = update.stop_token
        keeps_stop = self._request.params.include_stop_str_in_output
        pieces, taken = [], 0
        for token in update.token_ids:
            taken += 1
            self._num_tokens += 1
            if taken == len(update.token_ids) and ends_here and not keeps_stop:
                break  # a stop token is counted, and is no part of the text
            text = self._detokenizer.push((token,))
            self._marks.push(len(text), taken <= update.num_accepted)  # the round's last is the target's own
            if self._stops is None:
                pieces.append(text)
                continue
            emitted, matched = self._stops.push(text, exempt=self._is_exempt)
            pieces.append(emitted)
            if matched is not None:
                return self._output(pieces, update, taken, FinishReason.STOP, matched, num_cached_tokens)
        if reason is not None:
            matched = self._finish(pieces)
            if matched is not None:
                reason, stop_reason = FinishReason.STOP, matched
        return self._output(pieces, update, taken, reason, stop_reason, num_cached_tokens)

    @property
    def _is_exempt(self) -> bool:
        """Whether no stop string may end yet: nothing stops before min_tokens. As in vLLM, one may begin."""
        return self._num_tokens <= self._request.params.min_tokens

    def _finish(self, pieces: list[str]) -> str | None:
        """Releases held text at the end; it may complete a stop string after all."""
        rest = self._detokenizer.finish()
        self._marks.push(len(rest), False)  # bytes that no token made a character of
        if self._stops is None:
            pieces.append(rest)
            return None
        emitted, matched = self._stops.push(rest, exempt=self._is_exempt)
        pieces.append(emitted)
        if matched is None:
            pieces.append(self._stops.finish())
        return matched

    def _output(
        self,
        pieces: Sequence[str],
        update: TokenUpdate,
        taken: int,
        reason: FinishReason | None,
        stop_reason: int | str | None,
        num_cached_tokens: int,
    ) -> RequestOutput:
        queued, self._queued_seconds = self._queued_seconds, None
        prompt, self._prompt_logprobs = self._prompt_logprobs, {}
        text = "".join(pieces)
        return RequestOutput(
            queued_seconds=queued,
            request_id=self._request.request_id,
            text=text,
            accepted_spans=self._marks.take(len(text)),
            token_ids=update.token_ids[:taken],
            logprobs=tuple(map(self._with_data, update.logprobs[:taken])),
            prompt_logprobs=tuple(prompt[position] for position in sorted(prompt)),
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=num_cached_tokens,
            speculation=self._speculation() if reason is not None else None,
        )

    def _speculation(self) -> SpeculationStats:
        longest = max(self._accepted, default=-1)
        return SpeculationStats(
            num_rounds=self._accepted.total(),
            num_draft_tokens=self._num_drafts,
            num_accepted_tokens=sum(count * rounds for count, rounds in self._accepted.items()),
            acceptance_histogram=tuple(self._accepted[j] for j in range(longest + 1)),
            per_round_accepted=tuple(self._rounds),
        )
