"""The chat's loop: turns, commands, answers.

Exit codes: 0 after /quit, the end of the input or a second Ctrl-C at the prompt, 2 for a mistake in
flags, files or models, 130 when a second Ctrl-C ended the process inside an answer.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence

from mtp_jax.chat.answer import AnswerStats, answer
from mtp_jax.chat.conversation import Conversation
from mtp_jax.chat.settings import ChatOptions, change, describe, parse_options
from mtp_jax.chat.terminal import ACCEPTED, RESET, Interrupts, Terminal, use_color
from mtp_jax.errors import CheckpointError, InvalidRequestError, InvalidValueError, UnsupportedHereError
from mtp_jax.llm import LLM
from mtp_jax.loading import resolve_model
from mtp_jax.request import RequestOutput, expand_request
from mtp_jax.server.arguments import fail

HELP = """\
/reset                 forget the conversation; the system message stays
/system TEXT           set the system message and forget the conversation; no TEXT removes it
/set NAME=VALUE ...    change sampling; /set alone shows it
/help                  this
/quit                  leave; so does Ctrl-D
Ctrl-C stops an answer, a second one leaves. A turn that begins with a slash is written with two."""


class Chat:
    """One conversation at a terminal.

    Args:
      llm: has a chat template, and nothing else to do.
    """

    def __init__(self, llm: LLM, options: ChatOptions, terminal: Terminal):
        self._engine, self._terminal = llm.engine, terminal
        self._conversation = Conversation(
            llm.get_tokenizer(), self._engine.config.max_model_len, options.system
        )
        self._params = options.params
        self._ids = itertools.count()
        self._total = AnswerStats()
        self._interrupted = False  # the last thing that happened was a Ctrl-C
        self._commands: dict[str, Callable[[str], None]] = {
            "reset": self._reset,
            "system": self._system,
            "set": self._set,
            "help": lambda _: self._terminal.line(HELP),
        }

    def run(self) -> None:
        """Takes turns until the end of the input."""
        self._greet()
        while (turn := self._next_turn()) is not None:
            if turn.startswith("//"):
                turn = turn[1:]
            elif turn.startswith("/"):
                name, _, rest = turn[1:].partition(" ")
                if name == "quit":
                    break
                self._command(name, rest.strip())
                continue
            if turn.strip():
                self._answer(turn)
        if count := self._total.num_answers:
            self._terminal.line(f"[total of {count}: {self._total.describe()}]")

    def _greet(self) -> None:
        engine, terminal = self._engine, self._terminal
        terminal.line(f"{engine.model_name}; /help lists the commands")
        if not engine.config.num_speculative_tokens:
            terminal.line("nothing is drafted: the model has no MTP head, or it is switched off")
        elif terminal.color:
            terminal.line(f"text from accepted drafts is {ACCEPTED}green{RESET}")

    def _next_turn(self) -> str | None:
        while True:
            try:
                turn = self._terminal.read()
            except KeyboardInterrupt:
                self._terminal.line("")
                if self._interrupted or not self._terminal.interactive:
                    return None
                self._interrupted = True
                self._terminal.line("Ctrl-C again, Ctrl-D or /quit leaves")
                continue
            self._interrupted = False
            return turn

    def _command(self, name: str, rest: str) -> None:
        try:
            if name not in self._commands:
                raise InvalidRequestError("command", f"/{name}", "one that /help lists")
            self._commands[name](rest)
        except InvalidRequestError as error:
            self._terminal.line(str(error))

    def _reset(self, rest: str) -> None:
        self._conversation.reset()
        self._terminal.line("the conversation is forgotten")

    def _system(self, text: str) -> None:
        self._conversation.system = text or None
        self._reset("")

    def _set(self, text: str) -> None:
        self._params = change(self._params, text)
        self._terminal.line(describe(self._params))

    def _answer(self, turn: str) -> None:
        terminal = self._terminal
        try:
            ids, dropped = self._conversation.prompt(turn, self._params.max_tokens)
            if dropped:
                terminal.line(f"(the context is full: the {dropped} oldest turns were forgotten)")
            (request,) = expand_request(f"chat-{next(self._ids)}", ids, self._params)
            with Interrupts() as interrupts:
                text, stats = answer(self._engine, request, self._show, lambda: interrupts.requested)
        except InvalidRequestError as error:
            terminal.line(str(error))
            return
        terminal.answer("\n")
        self._interrupted = interrupts.requested
        stopped = "stopped, " if interrupts.requested else ""
        terminal.line(f"[{stopped}{stats.describe()}]")
        self._total += stats
        if text:
            self._conversation.add(turn, text)

    def _show(self, output: RequestOutput) -> None:
        self._terminal.answer(output.text, output.accepted_spans)


def main(argv: Sequence[str] | None = None, prog: str = "mtp-jax chat") -> int:
    """Chats until told to stop, then ends the process; returns the exit code for a mistake."""
    options = parse_options(sys.argv[1:] if argv is None else argv, prog)
    terminal = Terminal(use_color(options.color, sys.stdout), sys.stdin, sys.stdout, sys.stderr)
    try:
        if not resolve_model(options.engine.model).tokenizer().has_chat_template:  # before anything slow
            raise CheckpointError("--model", options.engine.model, "a model with a chat template")
        llm = LLM(**options.engine.llm_arguments)
    except (InvalidValueError, UnsupportedHereError) as error:
        return fail(prog, error)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on Ctrl-C is the chat's
    Chat(llm, options, terminal).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # closing the engine would wait for programs that are still being compiled, for nobody
