"""The trainer's command line: mistakes are one line that names the flag, and exit code 2."""

import pytest

from mtp_jax.train.arguments import TrainOptions, parse_options


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "the following arguments are required: --out"),
        (["--out", ""], "--out: got ''; expected a text that is not empty"),
        (["--out", "x", "--steps", "0"], "--steps: got '0'; expected an integer of at least 1"),
        (["--out", "x", "--num-speculative-tokens", "9"], "--num-speculative-tokens: got '9'; expected"),
        (["--out", "x", "--shard", "4/4"], "--shard: got '4/4'; expected I/N with I from 0 to N - 1"),
        (["--out", "x", "--shard", "1/4"], "--shard: got '1/4'; expected it together with --generate-only"),
        (["--out", "x", "--step-weights", "1,a"], "--step-weights: got '1,a'; expected weights such as"),
        (["--out", "x", "--batch-tokens", "1000"], "--batch-tokens: got 1000; expected a multiple of"),
        (["--out", "x", "--micro-batch-tokens", "3072"], "--micro-batch-tokens: got 3072; expected"),
        (["--out", "x", "--text", "t"], "--text: got 't'; expected it together with --from-scratch"),
        (["--out", "x", "--from-scratch", "c", "--model", "m"], "--from-scratch: got 'c'; expected not both"),
        (["--out", "x", "--learning", "1"], "--learning: no such flag; did you mean --learning-rate?"),
    ],
)
def test_mistakes(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        parse_options(argv, "train")
    error = capsys.readouterr().err
    assert exit_code.value.code == 2
    assert error.startswith(f"train: {line}") and error.count("\n") == 1


def test_values() -> None:
    flags = [
        "--out",
        "o",
        "--prompts",
        "a",
        "b",
        "--shard",
        "1/4",
        "--generate-only",
        "--step-weights",
        "1,0.5",
        "--epochs",
        "1.5",
    ]
    assert parse_options(flags, "train") == TrainOptions(
        out="o",
        prompts=("a", "b"),
        shard=(1, 4),
        generate_only=True,
        step_weights=(1.0, 0.5),
        epochs=1.5,
    )


@pytest.mark.parametrize(("num_drafts", "weights"), [(1, (1.0,)), (2, (1.0, 0.5)), (4, (1.0, 0.5, 0.5, 0.5))])
def test_step_weights_go_on_with_the_last(num_drafts: int, weights: tuple[float, ...]) -> None:
    options = TrainOptions(num_speculative_tokens=num_drafts, step_weights=(1.0, 0.5))
    assert options.weights_of_steps() == weights


def test_help_has_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        parse_options(["--help"], "train")
    assert exit_code.value.code == 0
    assert f"(default: {TrainOptions.batch_tokens})" in " ".join(capsys.readouterr().out.split())
