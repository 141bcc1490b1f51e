"""What a request says about the form of its answers: OpenAI's ``response_format``, and vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from optimized.server.errors import RequestError
from optimized.server.json_types import Flag
from optimized.structured_outputs import StructuredOutputsParams


class JsonSchema(BaseModel):
    """A schema with its name. ``strict`` is of no meaning here: an answer always follows its schema."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Flag | None = None


class TextFormat(BaseModel):
    """Whatever the model says."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class ObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["json_object"]


class SchemaFormat(BaseModel):
    """JSON that follows a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
    """One of five ways to say what an answer looks like."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: Flag | None = None


def structure_of(
    response_format: TextFormat | ObjectFormat | SchemaFormat | None, asked: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What answers look like, if anything is said of it. Raises ``InvalidField``."""
    if response_format is None or isinstance(response_format, TextFormat):
        if asked is None:
            return None
        return StructuredOutputsParams(
            json=asked.json_,
            regex=asked.regex,
            choice=asked.choice,
            grammar=asked.grammar,
            json_object=asked.json_object,
        )
    if asked is not None:
        raise RequestError(
            400, "invalid_value", "structured_outputs and response_format say two things", "structured_outputs"
        )
    if isinstance(response_format, ObjectFormat):
        return StructuredOutputsParams(json_object=True, asked_as="response_format")
    return StructuredOutputsParams(json=response_format.json_schema.schema_, asked_as="response_format")
