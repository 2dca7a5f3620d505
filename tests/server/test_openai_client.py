"""The official client works unchanged."""

import openai
import pytest

from tests.server.running import LocalServer


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="abc!", max_tokens=30, temperature=0)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.created > 0
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("fp_")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        4,
        4,
        8,
    )


def test_completion_defaults_to_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="default", prompt="ab", temperature=0)
    assert answer.choices[0].text == "ab" * 8
    assert answer.choices[0].finish_reason == "length"


def test_chat_defaults_to_the_rest_of_the_context(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="default", messages=messages, temperature=0)  # pyright: ignore
    assert answer.usage is not None and answer.usage.total_tokens == 128
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.content.startswith("<user>hello<assistant><user>")


def test_temperature_defaults_to_one(client: openai.OpenAI) -> None:
    """The scripted engine shifts every character by its seed when it samples."""
    answer = client.completions.create(model="default", prompt="aaa", max_tokens=3, seed=3)
    assert answer.choices[0].text == "ddd"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab!", ["ab"]),
        (["ab!", "cd!"], ["ab", "cd"]),
        ([97, 98, 33], ["ab"]),
        ([[97, 33], [98, 33]], ["a", "b"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_shape_of_prompt(client: openai.OpenAI, prompt: object, texts: list[str]) -> None:
    answer = client.completions.create(model="default", prompt=prompt, max_tokens=8, temperature=0)  # pyright: ignore
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_n_choices_have_seeds_of_their_own_and_the_prompt_is_billed_once(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="default", prompt=["aa", "bb"], max_tokens=2, n=3, seed=1)
    assert [choice.text for choice in answer.choices] == ["bb", "cc", "dd", "cc", "dd", "ee"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == 12


def test_without_a_seed_one_is_drawn(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model="default", prompt="a", max_tokens=1).choices[0].text
        for _ in range(30)
    }
    assert len(texts) > 1


@pytest.mark.parametrize("stop", ["cd", ["zz", "cd"]], ids=["one", "list"])
def test_stop_strings(client: openai.OpenAI, stop: str | list[str]) -> None:
    answer = client.completions.create(
        model="default", prompt="abcdef", max_tokens=20, temperature=0, stop=stop
    )
    assert answer.choices[0].text == "ab" and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_dump()["stop_reason"] == "cd"
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_extra_parameters(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "stop_token_ids": [ord("c")], "top_k": 5, "num_speculative_tokens": 0}
    extra |= {"skip_special_tokens": False, "include_metrics": True}
    answer = client.completions.create(
        model="default", prompt="a!bc", max_tokens=20, temperature=0, user="me", extra_body=extra
    )
    assert answer.choices[0].text == "a!bc"
    assert answer.choices[0].model_dump()["stop_reason"] == ord("c")
    assert answer.model_dump()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_metrics_of_one_request(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt="ab", max_tokens=6, temperature=0, extra_body={"include_metrics": True}
    )
    assert answer.model_dump()["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 2],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 4,
        "num_spec_tokens": 2,
    }


def test_cached_tokens(client: openai.OpenAI) -> None:
    prompt = "a prompt that is longer than a page of sixteen tokens"
    cached = []
    for _ in range(2):
        usage = client.completions.create(model="default", prompt=prompt, max_tokens=1, temperature=0).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 48]


def test_streamed_completion_is_the_same_text(client: openai.OpenAI) -> None:
    arguments = {"model": "default", "prompt": ["abc!", "defgh!"], "max_tokens": 20, "temperature": 0, "n": 2}
    whole = client.completions.create(**arguments)  # pyright: ignore
    texts, reasons = [""] * 4, [""] * 4
    for chunk in client.completions.create(stream=True, **arguments):  # pyright: ignore
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        assert chunk.usage is None
    assert texts == [choice.text for choice in whole.choices] == ["abc", "abc", "defgh", "defgh"]
    assert reasons == ["stop"] * 4


def test_streamed_chat_in_order(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="default",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i!"}]}
        ],
        max_completion_tokens=50,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "<user>hi"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"


def test_an_assistants_message_can_be_sent_back(client: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": "a!"}]
    answer = client.chat.completions.create(model="default", messages=messages, temperature=0)
    messages += [answer.choices[0].message, {"role": "user", "content": "b!"}]
    again = client.chat.completions.create(model="default", messages=messages, temperature=0)
    assert again.choices[0].message.content == "<user>a"


def test_developer_messages_are_the_systems(client: openai.OpenAI) -> None:
    messages: list = [{"role": "developer", "content": "x!"}]
    answer = client.chat.completions.create(model="default", messages=messages, temperature=0)
    assert answer.choices[0].message.content == "<system>x"


def test_raw_stream_ends_with_done(server: LocalServer, http) -> None:
    body = {"prompt": "añ→𝄞!", "max_tokens": 9, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line for line in answer.iter_lines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_tokenize_and_back(http) -> None:
    made = http.post("/tokenize", json={"prompt": "añ", "return_token_strs": True}).json()
    assert made == {"count": 2, "max_model_len": 128, "tokens": [97, 241], "token_strs": ["a", "ñ"]}
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "añ"}
    chat = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    assert http.post("/tokenize", json=chat).json()["count"] == len("<user>a")


def test_request_ids(http) -> None:
    assert http.get("/v1/models", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = http.get("/v1/models", headers={"X-Request-Id": "not a token"}).headers["x-request-id"]
    assert len(made) == 32
