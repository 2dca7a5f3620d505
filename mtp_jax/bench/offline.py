"""The engine in this process, all prompts at once."""

import time

import jax
from tqdm import tqdm

from mtp_jax.bench.acceptance import SpeculationCounts, from_engine
from mtp_jax.bench.arguments import OfflineLoad
from mtp_jax.bench.prompts import Prompt, make_prompts
from mtp_jax.bench.records import Record
from mtp_jax.errors import InvalidRequestError
from mtp_jax.llm import LLM
from mtp_jax.request import EngineRequest, RequestOutput, expand_request


def measure(load: OfflineLoad) -> tuple[str, str, list[Record], SpeculationCounts]:
    """Runs the benchmark: names of model and device, the requests and what speculation did.

    A request is sent when it is handed to the engine, so waiting for a slot is in its time to first
    token; chunks are the engine's increments.

    Raises:
      InvalidValueError: a model or a file of prompts that cannot be used.
    """
    with LLM(**load.engine.llm_arguments) as llm:
        warm_ups, measured = make_prompts(load, llm.engine.model_config.vocab_size)
        _run(llm, warm_ups, load, "warm")
        before = from_engine(llm.stats())
        records = _run(llm, measured, load, "bench")
        device = f"{jax.device_count()} x {jax.devices()[0].device_kind} ({jax.default_backend()})"
        return llm.engine.model_name, device, records, from_engine(llm.stats()).since(before)


def _run(llm: LLM, prompts: list[Prompt], load: OfflineLoad, name: str) -> list[Record]:
    """One record a prompt, in the order of the prompts."""
    engine = llm.engine
    records: dict[str, Record] = {}
    sent: dict[str, float] = {}
    increments: dict[str, list[tuple[float, RequestOutput]]] = {}
    names: list[str] = []
    for index, prompt in enumerate(prompts):
        request_id, now = f"{name}-{index}-0", time.perf_counter()
        names.append(request_id)
        try:
            engine.add_request(_request(llm, prompt, load, f"{name}-{index}", load.seed + index))
        except InvalidRequestError as error:
            records[request_id] = Record(now, now, error=str(error))
        else:
            sent[request_id], increments[request_id] = now, []
    with tqdm(total=len(increments), desc="requests", disable=None) as bar:
        while engine.has_work():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                increments[output.request_id].append((now, output))
                bar.update(output.finish_reason is not None)
    for request_id, seen in increments.items():
        records[request_id] = Record(
            sent=sent[request_id],
            ended=seen[-1][0],
            chunks=tuple(now for now, output in seen if output.token_ids),
            num_prompt_tokens=seen[-1][1].num_prompt_tokens,
            num_output_tokens=sum(len(output.token_ids) for _, output in seen),
        )
    return [records[request_id] for request_id in names]


def _request(llm: LLM, prompt: Prompt, load: OfflineLoad, name: str, seed: int) -> EngineRequest:
    """Raises InvalidRequestError where the template or the vocabulary has no place for the prompt."""
    tokenizer, size = llm.get_tokenizer(), llm.engine.model_config.vocab_size
    if load.endpoint == "chat":
        text = tokenizer.apply_chat_template(prompt.as_messages())
        ids = tokenizer.encode(text, add_special_tokens=False)
    elif isinstance(prompt.content, str):
        ids = tokenizer.encode(prompt.content)
    else:
        ids = [token for token in prompt.content if isinstance(token, int)]
    if ids and max(ids) >= size:
        raise InvalidRequestError("prompt", max(ids), f"token ids from 0 to {size - 1}")
    return expand_request(name, ids, load.sampling_params(prompt.max_tokens, seed))[0]
