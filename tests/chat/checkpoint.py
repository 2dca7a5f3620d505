"""A tiny model for chats, whose drafts nearly always stand."""

import json
from pathlib import Path

from benchmarks.random_checkpoint import write_checkpoint

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}assistant:"
# Few buckets, so that little is compiled.
FLAGS = "--num-speculative-tokens 2 --max-num-seqs 1 --max-model-len 256 --page-size 128 --prefill-chunk 32"
ENGINE = tuple(FLAGS.split())


def write_chat_model(directory: Path) -> Path:
    """Writes the checkpoint with a chat template; its path."""
    write_checkpoint("tiny", directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory
