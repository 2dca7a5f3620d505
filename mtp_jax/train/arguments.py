"""Flags of the trainer, and what they come to: `TrainOptions`. Help text reads its defaults from there."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from mtp_jax.config import MAX_SPECULATIVE_TOKENS
from mtp_jax.errors import InvalidValueError
from mtp_jax.server.arguments import Parser, flag_of
from mtp_jax.server.readers import any_text, number
from mtp_jax.train.initial import INITS, Init

Optimizer = Literal["adamw", "muon"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "muon")
DTYPES = ("auto", "float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Everything the trainer was asked for."""

    out: str = ""
    model: str | None = None
    data: str | None = None  # None: OUT/data
    dtype: str = "auto"
    # A target that is trained too
    from_scratch: str | None = None  # its config.json
    text: tuple[str, ...] = ()
    mtp_loss_weight: float = 0.3
    # Text that the target writes
    tokens: int = 20_000_000
    prompts: tuple[str, ...] = ()
    held_out_prompts: tuple[str, ...] = ()
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))  # and weights
    own_prompts: float = 0.5
    max_tokens: int = 384
    max_num_seqs: int | None = None
    generate_only: bool = False
    shard: tuple[int, int] = (0, 1)  # index, count
    # The module
    num_speculative_tokens: int = 3
    step_weights: tuple[float, ...] = (1.0, 0.8, 0.6)
    label_weight: float = 0.5
    greedy_weight: float = 2.0
    draft_vocab_size: int = 8192
    init: Init = "last-layer"
    # The run
    steps: int | None = None
    epochs: float = 4.0
    batch_tokens: int = 65536
    micro_batch_tokens: int | None = None  # None: the whole batch at once
    sequence_length: int = 1024
    optimizer: Optimizer = "muon"
    learning_rate: float = 1e-3
    muon_learning_rate: float = 4e-3
    warmup_steps: int = 200
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    ema: float = 0.998
    held_out_samples: int = 256
    evaluate_every: int = 200
    checkpoint_every: int = 500
    time_limit: float | None = None
    devices: int | None = None
    seed: int = 0

    def weights_of_steps(self) -> tuple[float, ...]:
        """K weights; a short list goes on with its last one."""
        missing = self.num_speculative_tokens - len(self.step_weights)
        weights = self.step_weights + (self.step_weights[-1],) * max(missing, 0)
        return weights[: self.num_speculative_tokens]


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected I/N with I from 0 to N - 1, such as 0/4")
    return int(index), int(count)


def _weights(text: str) -> tuple[float, ...]:
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if not weights or not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected weights such as 1,0.8,0.6")
    return weights


def _temperatures(text: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        read = tuple((float(temperature), float(weight)) for temperature, weight in pairs)
    except ValueError:
        read = ()
    if not read or not all(0 <= t < math.inf and 0 < weight < math.inf for t, weight in read):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected T:WEIGHT,T:WEIGHT, such as 0:0.6,1:0.4")
    return read


_COUNT, _ABOVE_0 = number(int, 1), number(float, 1e-12)
# Group -> flag field -> (help, how to read it, choices).
_Flag = tuple[str, Callable[[str], object], tuple[str, ...] | None]
FLAGS: dict[str, dict[str, _Flag]] = {
    "files": {
        "out": ("folder of the run: checkpoints, curves and the head (required)", any_text, None),
        "model": ("the target: Hugging Face directory or GGUF file; else the default model", any_text, None),
        "data": (
            "folder of the target's own text, written where there is none; else OUT/data",
            any_text,
            None,
        ),
        "dtype": ("compute type; auto is float32 on CPU and bfloat16 elsewhere", any_text, DTYPES),
    },
    "training a target from scratch": {
        "from_scratch": (
            "config.json of a target to train together with its module, on text",
            any_text,
            None,
        ),
        "mtp_loss_weight": (
            "weight of the drafts' mean loss",
            number(float, 0),
            None,
        ),
    },
    "text": {
        "tokens": ("tokens that the target writes for its training text", _COUNT, None),
        "temperatures": ("that it is sampled at, each with its share, as T:SHARE,...", _temperatures, None),
        "own_prompts": ("share of the prompts that the target writes itself", number(float, 0, 1), None),
        "max_tokens": ("tokens of a completion at most", _COUNT, None),
        "max_num_seqs": ("completions written together; else 256, 16 on CPU", _COUNT, None),
        "shard": ("write only part I of N of the text, as I/N", _shard, None),
    },
    "module": {
        "num_speculative_tokens": (
            "drafts a round to train for",
            number(int, 1, MAX_SPECULATIVE_TOKENS),
            None,
        ),
        "step_weights": ("weights of drafts 1, 2, ... in the loss; the last goes on", _weights, None),
        "label_weight": (
            "share of the loss that counts the target's best token only, for greedy decoding",
            number(float, 0, 1),
            None,
        ),
        "greedy_weight": ("weight of greedily written text; other text's is 1", _ABOVE_0, None),
        "draft_vocab_size": (
            "most frequent tokens that drafts choose among; 0 is all",
            number(int, 0),
            None,
        ),
        "init": ("where the module starts", any_text, INITS),
    },
    "run": {
        "steps": ("updates; else as many as --epochs makes", _COUNT, None),
        "epochs": ("passes over the text", _ABOVE_0, None),
        "batch_tokens": ("tokens of an update, padding counted", _COUNT, None),
        "micro_batch_tokens": ("tokens computed at once on all devices; else a whole update", _COUNT, None),
        "sequence_length": ("tokens of a packed row", number(int, 8), None),
        "optimizer": ("of the matrices; norms and biases always have AdamW", any_text, OPTIMIZERS),
        "learning_rate": ("peak of AdamW's learning rate; half a cosine follows", _ABOVE_0, None),
        "muon_learning_rate": ("peak of Muon's; its updates are of AdamW's size", _ABOVE_0, None),
        "warmup_steps": ("updates until the peak, a tenth of all at most", number(int, 0), None),
        "weight_decay": ("of matrices, times the learning rate", number(float, 0), None),
        "clip_norm": ("largest norm of a gradient", _ABOVE_0, None),
        "ema": (
            "share of a moving average of the weights that an update keeps; it is measured and exported",
            number(float, 0, 0.999999),
            None,
        ),
        "held_out_samples": ("samples that are measured and not trained on", _COUNT, None),
        "evaluate_every": ("updates between held-out measurements", _COUNT, None),
        "checkpoint_every": ("updates between checkpoints", _COUNT, None),
        "time_limit": (
            "seconds of training after which it ends and exports; with --generate-only, of writing",
            _ABOVE_0,
            None,
        ),
        "devices": ("devices to spread a batch over; else all", _COUNT, None),
        "seed": ("of the module, the split and the order of the text", number(int, 0), None),
    },
}


def make_parser(prog: str) -> Parser:
    """The parser; flags that are not given leave no attribute behind."""
    parser = Parser(
        prog,
        "Train an MTP head for a model on text that the model writes. The same command "
        "goes on with a run that was stopped.",
    )
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for field, (text, read, choices) in flags.items():
            default = _shown(getattr(TrainOptions(), field))
            shown = text if default is None else f"{text} (default: {default})"
            group.add_argument(
                flag_of(field),
                dest=field,
                type=read,
                choices=choices,
                required=field == "out",
                help=shown.replace("%", "%%"),
                metavar=None if choices else field.rsplit("_", 1)[-1].upper(),
            )
        if title == "text":
            for flag, text in (
                ("--text", "files of text for --from-scratch, read by the tokenizer beside its config.json"),
                ("--prompts", "files of prompts for the text: one a line, or .jsonl; else built-in ones"),
                (
                    "--held-out-prompts",
                    "files of prompts that a benchmark keeps: not in the text, nor nearly",
                ),
            ):
                group.add_argument(flag, nargs="+", type=any_text, metavar="FILE", help=text)
            group.add_argument(
                "--generate-only", dest="generate_only", action="store_true", help="write the text and end"
            )
    return parser


def _shown(value: object) -> str | None:
    if value is None or value == "" or value == (0, 1):
        return None
    if isinstance(value, tuple):
        return ",".join(
            ":".join(f"{x:g}" for x in part) if isinstance(part, tuple) else f"{part:g}" for part in value
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_options(argv: Sequence[str], prog: str) -> TrainOptions:
    """Reads the command line.

    Raises:
      SystemExit: code 2 after one line on stderr; code 0 after --help.
    """
    parser = make_parser(prog)
    given = parser.given(argv)
    for field in given.keys() & {"text", "prompts", "held_out_prompts"}:
        given[field] = tuple(given[field])
    options = TrainOptions(**given)
    try:
        check(options)
    except InvalidValueError as error:
        parser.error(str(error))
    return options


def check(options: TrainOptions) -> None:
    """Raises InvalidValueError where flags do not fit one another."""
    whole, length = options.batch_tokens, options.sequence_length
    if whole % length:
        raise InvalidValueError("--batch-tokens", whole, f"a multiple of --sequence-length, {length}")
    part = options.micro_batch_tokens
    if part is not None and (part % length or whole % part):
        legal = f"a multiple of --sequence-length, {length}, that divides --batch-tokens, {whole}"
        raise InvalidValueError("--micro-batch-tokens", part, legal)
    if options.from_scratch and (options.model or options.generate_only):
        other = "--model" if options.model else "--generate-only"
        raise InvalidValueError("--from-scratch", options.from_scratch, f"not both this and {other}")
    if options.text and not options.from_scratch:
        raise InvalidValueError("--text", options.text[0], "it together with --from-scratch")
    if options.shard != (0, 1) and not options.generate_only:
        raise InvalidValueError(
            "--shard", "/".join(map(str, options.shard)), "it together with --generate-only"
        )
