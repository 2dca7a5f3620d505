"""The turns so far, and the prompt that they come to."""

from mtp_jax.text.tokenizer import Tokenizer

ROOM_SHARE = 4  # an answer finds at least this part of the context free, unless it needs less


class Conversation:
    """Messages by the model's chat template.

    Args:
      tokenizer: the model's; it has a chat template.
      max_model_len: tokens of prompt and answer together.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, system: str | None):
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self.system = system
        self._turns: list[tuple[str, str]] = []  # what the user said, what was answered

    def reset(self) -> None:
        """Forgets the turns; the system message stays."""
        self._turns.clear()

    def add(self, user: str, answer: str) -> None:
        """Remembers a turn and its answer."""
        self._turns.append((user, answer))

    def prompt(self, user: str, max_tokens: int | None) -> tuple[tuple[int, ...], int]:
        """Token ids of the prompt for the next turn. The oldest turns are forgotten where they do not fit.

        Args:
          max_tokens: the longest answer; None is what the context allows.

        Returns:
          the ids, and how many turns were forgotten.

        Raises:
          InvalidRequestError: the template refuses the conversation.
        """
        room = self._max_model_len // ROOM_SHARE if max_tokens is None else max_tokens
        dropped = 0
        while True:
            ids = self._encode(user)
            if len(ids) + room <= self._max_model_len or not self._turns:
                return ids, dropped
            del self._turns[0]
            dropped += 1

    def _encode(self, user: str) -> tuple[int, ...]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for said, answered in self._turns:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
        text = self._tokenizer.apply_chat_template([*messages, {"role": "user", "content": user}])
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
