"""Before processes build one engine together: that they are about to build the same."""

import dataclasses
import json

from mtp_jax.engine.build import Blueprint
from mtp_jax.engine.follower import Follower
from mtp_jax.engine.leader import Leader
from mtp_jax.loading import PlacedDir
from mtp_jax.loading.fingerprint import target_fingerprint


def agree(blueprint: Blueprint, hosts: Leader | Follower) -> Blueprint:
    """What all processes build: alike, and with no more pages than any of them has room for.

    Raises:
      InvalidValueError: in process 0, where another one is about to build something else.
    """
    config = blueprint.config
    fields = {f"EngineConfig.{name}": value for name, value in dataclasses.asdict(config).items()}
    del fields["EngineConfig.num_pages"]
    fields |= {"model": _fingerprint(blueprint), "stages": blueprint.program.layout.plan.describe()}
    described = json.loads(json.dumps(fields))  # as it arrives there: no tuples
    num_pages = hosts.agree(described, config.num_pages)
    program = dataclasses.replace(blueprint.program, config=dataclasses.replace(config, num_pages=num_pages))
    memory = dataclasses.replace(blueprint.memory, num_pages=num_pages)
    return dataclasses.replace(blueprint, program=program, memory=memory)


def _fingerprint(blueprint: Blueprint) -> str:
    """Of the weights, as far as the final norm tells them apart, and of what drafts are chosen from."""
    source = blueprint.source
    target = str(source.config) if isinstance(source, PlacedDir) else target_fingerprint(source)
    return f"{target}, drafts among {blueprint.program.layout.draft_vocab}"
