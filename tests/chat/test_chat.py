"""Chats over the real engine, in this process: commands, colours, Ctrl-C, figures."""

import io
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtp_jax.chat.answer import answer
from mtp_jax.chat.app import Chat, main
from mtp_jax.chat.conversation import Conversation
from mtp_jax.chat.settings import parse_options
from mtp_jax.chat.terminal import ACCEPTED, RESET, Terminal, use_color
from mtp_jax.llm import LLM
from mtp_jax.request import RequestOutput, expand_request
from mtp_jax.text.from_hf import tokenizer_from_directory
from tests.chat.checkpoint import ENGINE, write_chat_model

GREEDY = ("--temperature", "0", "--max-tokens", "24")
FIGURES = re.compile(
    r"\[(?:stopped, )?(\d+) tokens?, [\d.]+ tokens/s, first after [\d.]+ s, "
    r"accepted length ([\d.]+), acceptance ([\d.]+) %\]"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat") / "tiny_chat")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    arguments = parse_options([*ENGINE, "--model", str(model)], "chat").engine.llm_arguments
    with LLM(**arguments | {"compile_cache": None}, use_tqdm=False) as made:
        yield made


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class CtrlC(io.StringIO):
    """Ctrl-C comes when the answer is some characters long."""

    def write(self, text: str) -> int:
        if len(self.getvalue()) < 10 <= len(self.getvalue()) + len(text):
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def chat(
    llm: LLM, turns: str, *flags: str, color: bool = False, stdout: io.StringIO | None = None
) -> tuple[str, str]:
    """What a chat of these turns, one a line, writes to stdout and stderr."""
    out, err = stdout or io.StringIO(), io.StringIO()
    Chat(llm, parse_options(flags, "chat"), Terminal(color, io.StringIO(turns), out, err)).run()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    return out.getvalue(), err.getvalue()


def test_turns_and_figures(llm: LLM) -> None:
    before = llm.stats()
    out, err = chat(llm, "hello\n\nand now\n", *GREEDY)
    after = llm.stats()
    answers = FIGURES.findall(err)
    assert [int(tokens) for tokens, _, _ in answers] == [24, 24]
    assert [len(answer) > 5 for answer in out.splitlines()] == [True, True]
    total = re.search(r"\[total of 2: 48 tokens, .* accepted length ([\d.]+), acceptance ([\d.]+) %\]", err)
    assert total
    rounds, accepted = (
        after.num_drafts - before.num_drafts,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )
    assert total[1] == f"{1 + accepted / rounds:.2f}" and float(total[1]) > 2.5
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert total[2] == f"{100 * accepted / drafted:.1f}" and float(total[2]) > 80


def test_accepted_text_has_another_colour(llm: LLM) -> None:
    plain, _ = chat(llm, "hello\n", *GREEDY)
    out, err = chat(llm, "hello\n", *GREEDY, color=True)
    assert out.replace(ACCEPTED, "").replace(RESET, "") == plain and ACCEPTED not in plain
    green = "".join(re.findall(re.escape(ACCEPTED) + "(.*?)" + re.escape(RESET), out, re.DOTALL))
    assert out.count(ACCEPTED) == out.count(RESET)
    outputs: list[RequestOutput] = []
    params = parse_options(GREEDY, "chat").params
    ids, _ = Conversation(llm.get_tokenizer(), 256, None).prompt("hello", None)
    answer(llm.engine, expand_request("a", ids, params)[0], outputs.append, lambda: False)
    assert green == "".join(o.text[start:end] for o in outputs for start, end in o.accepted_spans)
    # Nearly all drafts stand, every round ends with another token, and many tokens have no text.
    assert 0 < len(green) < len(plain.strip())
    assert "green" in err


def test_commands(llm: LLM) -> None:
    turns = "/set max_tokens=5\nx\n/set top_p=7\n/nope\n/help\n//slash\n/system be short\n/quit\nnever\n"
    _, err = chat(llm, turns, *GREEDY)
    assert [int(tokens) for tokens, _, _ in FIGURES.findall(err)] == [5, 5]
    assert "temperature=0.0" in err and "max_tokens=5" in err
    assert "top_p: got '7'; expected a finite number from 0 to 1" in err
    assert "'/nope'" in err and "/reset " in err and "forgotten" in err


def test_the_conversation_goes_on_until_it_is_forgotten(llm: LLM) -> None:
    """A prompt of the conversation so far is longer, and a prefix that is cached; /reset starts again."""
    lengths = []
    for turns in ("hello\n", "hello\nhello\n", "hello\n/reset\nhello\n", "/system hi\nhello\n"):
        before = llm.stats().prefix_cache_queries
        chat(llm, turns, *GREEDY, "--max-tokens", "3")
        lengths.append(llm.stats().prefix_cache_queries - before)
    once = lengths[0]
    assert lengths[1] > 2 * once + 3 and lengths[2] == 2 * once
    assert lengths[3] == once + len("system: hi\n")


def test_old_turns_make_room(model: Path, llm: LLM) -> None:
    conversation = Conversation(tokenizer_from_directory(model), 100, "sys")
    conversation.add("a" * 30, "b" * 30)
    conversation.add("c", "d")
    ids, dropped = conversation.prompt("e", 8)
    assert (
        dropped == 1
        and llm.get_tokenizer().decode(ids) == "system: sys\nuser: c\nassistant: d\nuser: e\nassistant:"
    )
    ids, dropped = conversation.prompt("e", 60)
    assert dropped == 1 and llm.get_tokenizer().decode(ids) == "system: sys\nuser: e\nassistant:"
    _, err = chat(llm, "x" * 100 + "\n" + "y" * 100 + "\n", *GREEDY)
    assert "(the context is full: the 1 oldest turns were forgotten)" in err


def test_a_turn_that_never_fits_is_refused_and_forgotten(llm: LLM) -> None:
    _, err = chat(llm, "x" * 300 + "\nhello\n/set num_speculative_tokens=7\nhello\n", *GREEDY)
    assert len(FIGURES.findall(err)) == 1
    assert "prompt: got" in err and "num_speculative_tokens: got 7" in err


def test_ctrl_c_stops_the_answer(llm: LLM) -> None:
    before = signal.getsignal(signal.SIGINT)
    out, err = chat(llm, "hello\nmore\n", "--temperature", "0", "--max-tokens", "200", stdout=CtrlC())
    first, second = (int(tokens) for tokens, _, _ in FIGURES.findall(err))
    assert first < 100 and second == 200 and "[stopped, " in err
    assert out and signal.getsignal(signal.SIGINT) is before


def test_when_there_are_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert use_color("auto", Tty()) and not use_color("auto", io.StringIO())
    assert use_color("always", io.StringIO()) and not use_color("never", Tty())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color("auto", Tty()) and use_color("always", Tty())
    monkeypatch.setenv("NO_COLOR", "")
    assert use_color("auto", Tty())
    monkeypatch.setenv("TERM", "dumb")
    assert not use_color("auto", Tty())


def test_a_terminal_does_not_obey_the_model() -> None:
    text = "a\x1b[2J\tb\n\x9b31m\x07"
    for color in (False, True):
        screen, file = Tty(), io.StringIO()
        Terminal(color, io.StringIO(), screen, io.StringIO()).answer(text)
        Terminal(color, io.StringIO(), file, io.StringIO()).answer(text)
        assert screen.getvalue() == "a␛[2J\tb\n\ufffd31m␇" and file.getvalue() == text
    screen = Tty()
    Terminal(True, io.StringIO(), screen, io.StringIO()).answer("ab\x1bcd", [(1, 3), (4, 5)])
    assert screen.getvalue() == f"a{ACCEPTED}b␛{RESET}c{ACCEPTED}d{RESET}"


def test_a_model_without_a_template_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in model.iterdir():
        if path.name != "tokenizer_config.json":
            (tmp_path / path.name).symlink_to(path)
    assert main(["--model", str(tmp_path)], prog="chat") == 2
    error = capsys.readouterr().err
    assert error.startswith("chat: --model: got") and "chat template" in error and error.count("\n") == 1
