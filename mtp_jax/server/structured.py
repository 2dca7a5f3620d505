"""What a body says about the form of the answer, as a grammar."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mtp_jax.request import GrammarSpec, SamplingParams
from mtp_jax.server.body import Body, invalid
from mtp_jax.server.interface import EngineCore
from mtp_jax.text.grammar import choice, json_object, json_schema

# One grammar at a time: a compiler that takes seconds must not take the threads that tokenize.
_COMPILER = ThreadPoolExecutor(1, "mtp-jax-grammar")


class TextFormat(Body):
    type: Literal["text"] = "text"


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, object] = Field(alias="schema")
    strict: bool | None = None  # it is held to either way


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's parameter: one of the fields."""

    json_: dict[str, object] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if len(self.given) != 1:
            raise invalid("one of json, json_object, regex, choice and grammar")
        return self

    @property
    def given(self) -> list[str]:
        return [name for name, value in self if value is not None and value is not False]

    def spec(self) -> GrammarSpec:
        """Raises InvalidRequestError for a list of choices that is none."""
        field = "structured_outputs"
        if self.regex is not None:
            return GrammarSpec("regex", self.regex, field)
        if self.choice is not None:
            return choice(self.choice, field)
        if self.grammar is not None:
            return GrammarSpec("ebnf", self.grammar, field)
        if isinstance(self.json_, str):
            return GrammarSpec("json", self.json_, field)
        return json_schema(self.json_, field) if isinstance(self.json_, dict) else json_object(field)


def spec_of_format(form: ResponseFormat | None, field: str = "response_format") -> GrammarSpec | None:
    """OpenAI's `response_format`; `field` is what the caller knows it as."""
    match form:
        case JsonObjectFormat():
            return json_object(field)
        case JsonSchemaFormat():
            return json_schema(form.json_schema.schema_, field)
        case _:
            return None


async def compile_grammar(engine: EngineCore, params: SamplingParams) -> None:
    """Compiles a request's grammar off the event loop, so that the engine finds it.

    Raises:
      InvalidRequestError: it cannot be compiled.
    """
    if params.structured_outputs is not None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(_COMPILER, engine.compile_grammar, params.structured_outputs)
