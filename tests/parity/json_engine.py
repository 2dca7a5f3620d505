"""An engine of one random layer whose vocabulary is ASCII without white space: enough for JSON."""

import dataclasses
import functools

from mtp_jax.engine.buckets import BucketTable
from mtp_jax.engine.build import construct
from mtp_jax.engine.engine import Engine
from tests.parity.rig import TINY, RandomSource, blueprint
from tests.parity.scripted_model import EveryKind, do_everything

CONFIG = dataclasses.replace(TINY, num_hidden_layers=1, eos_token_ids=(96,))


def build_json_engine(k: int) -> Engine:
    """A new one, for contexts of 512 tokens; every dispatch serves any request."""
    drawn = blueprint(RandomSource(CONFIG), max_model_len=512, num_pages=1024, num_speculative_tokens=k)
    buckets = EveryKind(**{f.name: getattr(drawn.buckets, f.name) for f in dataclasses.fields(BucketTable)})
    return do_everything(construct(dataclasses.replace(drawn, buckets=buckets)))


json_engine = functools.cache(build_json_engine)
