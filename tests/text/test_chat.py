"""Chat templates: golden prompts, the names templates rely on, and refusals."""

import datetime
import json

import pytest
import tokenizers
from tokenizers import decoders, models

from mtp_jax.errors import InvalidRequestError
from mtp_jax.text import Tokenizer
from tests.text.conftest import GOLDEN

CHATS = json.loads((GOLDEN / "smollm2_tokenizer.json").read_text())["chats"]
HELLO = [{"role": "user", "content": "Hello"}]


def with_template(template) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, "here", {"bos_token": "<s>", "eos_token": "</s>"}, template)


@pytest.mark.parametrize("entry", CHATS, ids=range(len(CHATS)))
def test_golden_prompts(smollm2, entry):
    text = smollm2.apply_chat_template(
        entry["messages"], add_generation_prompt=entry["add_generation_prompt"]
    )
    assert text == entry["text"]
    assert smollm2.encode(text, add_special_tokens=False) == entry["ids"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hello</s>"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),  # trim_blocks and lstrip_blocks
        ("{{ {'a': '<&é>', 'b': [1]} | tojson }}", '{"a": "<&é>", "b": [1]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ tools is none }} {{ documents is none }} {{ missing is defined }}", "True True False"),
        ("{{ 'yes' if add_generation_prompt }}", "yes"),
        ("{{ messages[0]['content'].strip().upper() }}", "HELLO"),
    ],
)
def test_what_templates_may_use(template, text):
    assert with_template(template).apply_chat_template(HELLO) == text


def test_variables_of_the_caller():
    tokenizer = with_template("{{ enable_thinking }} {{ bos_token }}")
    assert tokenizer.apply_chat_template(HELLO, enable_thinking=False) == "False <s>"


@pytest.mark.parametrize("name", ["self", "messages", "tools", "documents", "add_generation_prompt", "a b"])
def test_no_variable_breaks_or_replaces_anything(name):
    tokenizer = with_template("{{ messages[0].content }} {{ add_generation_prompt }} {{ tools is none }}")
    variables = {name: None} if name in ("tools", "add_generation_prompt") else {name: 1}
    if name == "add_generation_prompt":  # a parameter of its own
        assert tokenizer.apply_chat_template(HELLO, **{name: False}) == "Hello False True"
    else:
        assert tokenizer.apply_chat_template(HELLO, **variables) == "Hello True True"


def test_the_date():
    text = with_template("{{ strftime_now('%Y') }}").apply_chat_template(HELLO)
    assert abs(int(text) - datetime.datetime.now().year) <= 1


def test_templates_by_name():
    tokenizer = with_template({"default": "plain", "tool_use": "{{ tools | length }} tools"})
    assert tokenizer.apply_chat_template(HELLO) == "plain"
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "1 tools"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template accepts"),
        ("{{ messages[5].content }}", "chat template accepts"),
        ("{{ messages.append(1) }}", "chat template accepts"),  # the sandbox forbids changes
        ("{{ ''.__class__.__mro__ }}", "chat template accepts"),
        ("{% for %}", "chat template accepts"),
        ("{{ 1 // 0 }}", "chat template accepts"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "chat template accepts"),
    ],
)
def test_refusals_are_the_request_s_field(template, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        with_template(template).apply_chat_template(HELLO)
    assert error.value.field == "messages"


def test_no_template():
    tokenizer = with_template(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match=r"messages: got '1 messages'.*no chat template"):
        tokenizer.apply_chat_template(HELLO)


def test_a_template_file_wins(tmp_path):
    from mtp_jax.text.from_hf import tokenizer_from_directory

    (tmp_path / "tokenizer.json").write_text((GOLDEN / "tiny_mimo" / "tokenizer.json").read_text())
    config = {"chat_template": [{"name": "default", "template": "from the list"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_from_directory(tmp_path).apply_chat_template(HELLO) == "from the list"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert tokenizer_from_directory(tmp_path).apply_chat_template(HELLO) == "from the file"
