"""The load on a server: requests as they arrive, at most so many at a time."""

import asyncio
import contextlib
import random
import time

from tqdm import tqdm

from mtp_jax.bench.acceptance import Scrape, SpeculationCounts
from mtp_jax.bench.arguments import ServeLoad
from mtp_jax.bench.client import ApiClient
from mtp_jax.bench.prompts import Prompt, arrivals, make_prompts
from mtp_jax.bench.records import Record

IDLE_SECONDS = 5.0  # that a server gets to count its last round


async def measure(load: ServeLoad) -> tuple[str, list[Record], SpeculationCounts | None]:
    """Runs the benchmark: the model's name, the requests and what speculation did.

    Raises:
      ServerError: no model was named, and the server does not say what it serves.
      InvalidValueError: a file of prompts that cannot be used.
    """
    warm_ups, measured = make_prompts(load, load.vocab_size)
    async with ApiClient(load.url, load.endpoint, load.api_key, load.timeout) as client:
        model = load.model or await client.first_model()
        parameters = {"model": model, **load.parameters}
        await asyncio.gather(*(client.complete(prompt, parameters) for prompt in warm_ups))
        before = await _idle(client)
        records = await _send(client, measured, parameters, load)
        after = await _idle(client)
    if before is None or after is None or before.speculation is None or after.speculation is None:
        return model, records, None
    return model, records, after.speculation.since(before.speculation)


async def _send(client: ApiClient, prompts: list[Prompt], parameters: dict, load: ServeLoad) -> list[Record]:
    """One record a prompt, in the order of the prompts."""
    gate = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()
    rng = random.Random(load.seed + 1)
    began = time.perf_counter()
    with tqdm(total=len(prompts), desc="requests", disable=None) as bar:

        async def one(prompt: Prompt) -> Record:
            async with gate:
                record = await client.complete(prompt, parameters)
            bar.update()
            return record

        tasks = []
        for prompt, due in zip(prompts, arrivals(len(prompts), load.request_rate, rng), strict=True):
            if (wait := began + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(prompt)))
        return await asyncio.gather(*tasks)


async def _idle(client: ApiClient) -> Scrape | None:
    """The server's metrics once nothing runs; those of the moment if that takes long."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        found = await client.scrape()
        if found is None or not found.num_unfinished or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.05)
