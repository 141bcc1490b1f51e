"""Tools that an answer has to call: a named one, or any of several. The grammar of the answer is that of one call."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from optimized.grammar_trial import WHITESPACE
from optimized.server.errors import RequestError, unsupported
from optimized.server.json_types import Flag
from optimized.structured_outputs import StructuredOutputsParams

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
CALL = re.compile(r'\{"name": "([^"]+)", "arguments": ')
"""How every answer begins. What follows are the arguments, and one more bracket."""

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(BaseModel):
    """A function, with the JSON schema of its arguments. ``strict`` is of no meaning: calls always follow the schema."""

    model_config = ConfigDict(extra="forbid")
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(BaseModel):
    """Something that an answer may call: a function."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """A function by its name."""

    model_config = ConfigDict(extra="forbid")
    name: str


class NamedTool(BaseModel):
    """The one tool that is to be called."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(BaseModel):
    """Which function is called, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One call."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SaidFunction(FunctionCall):
    """A function that was called. openai-python says the arguments again, as it has read them."""

    model_config = ConfigDict(extra="forbid")
    parsed_arguments: Any = None


class SaidCall(BaseModel):
    """A call that an earlier answer made."""

    model_config = ConfigDict(extra="forbid")
    id: str
    type: Literal["function"] = "function"
    function: SaidFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it, with its arguments as an object where they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


def callable_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> list[Tool]:
    """The tools of which the answer has to call one; none if it is to be text. Raises ``RequestError``."""
    if choice == "none" or (choice is None and not tools):
        return []
    if choice in (None, "auto"):
        given = "auto" if choice else "not given, which means auto"
        raise unsupported("tool_choice", f"is {given}, only none, required and a named tool are supported")
    if not tools:
        raise RequestError(400, "invalid_value", "tool_choice needs tools", "tool_choice")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError(400, "invalid_value", "two tools have the same name", "tools")
    if not isinstance(choice, NamedTool):
        return list(tools)
    if choice.function.name not in names:
        name = choice.function.name[:80]
        raise RequestError(
            400, "invalid_value", f"tool_choice names {name!r}, which is none of the tools", "tool_choice"
        )
    return [tools[names.index(choice.function.name)]]


def form_of_arguments(tool: Tool) -> StructuredOutputsParams:
    """What the arguments of a call look like. Raises ``InvalidField``."""
    return StructuredOutputsParams(json=tool.function.parameters or NO_PARAMETERS, asked_as="tools")


def call_of_one(tools: Sequence[Tool]) -> StructuredOutputsParams:
    """What an answer looks like that calls one of them. Raises ``InvalidField``."""
    lines = ["start: " + " | ".join(f"call{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        schema = form_of_arguments(tool).text
        begin = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        lines.append(f'call{index}: {begin} arguments{index} "}}"')
        lines.append(f"arguments{index}: %json {json.dumps(json.loads(schema) | options)}")
    return StructuredOutputsParams(grammar="\n".join(lines), asked_as="tools")


class GrowingCall:
    """A call of which the text comes in pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._begin: int | None = None
        self._sent = 0
        self.id = f"call_{uuid.uuid4().hex}"
        self.name: str | None = None

    def add(self, more: str, is_last: bool) -> str:
        """The arguments that this piece completes. The last character is held back: it could be the closing bracket."""
        self._text += more
        if self._begin is None:
            found = CALL.match(self._text)
            if found is None:
                return ""
            self.name, self._begin = found[1], found.end()
        arguments = self._text[self._begin :]
        if not is_last or self.is_whole:
            arguments = arguments[:-1]
        new = arguments[self._sent :]
        self._sent += len(new)
        return new

    def delta(self, more: str, is_last: bool) -> dict[str, Any]:
        """What this piece adds to the call, as a stream says it: its name first, then its arguments."""
        is_new = self.name is None
        arguments = self.add(more, is_last)
        if self.name is None or not (is_new or arguments):
            return {}
        function = {"arguments": arguments}
        if not is_new:
            return {"tool_calls": [{"index": 0, "function": function}]}
        head = {"index": 0, "id": self.id, "type": "function"}
        return {"tool_calls": [{**head, "function": {"name": self.name, **function}}]}

    @property
    def is_whole(self) -> bool:
        """Whether the call has come to its end, and was not cut off."""
        try:
            return isinstance(json.loads(self._text), dict)
        except ValueError:
            return False


def tool_call(text: str) -> tuple[ToolCall | None, bool]:
    """The call that a whole answer is, if it has a name at least, and whether it was cut off before its end."""
    growing = GrowingCall()
    arguments = growing.add(text, is_last=True)
    if growing.name is None:
        return None, True
    call = ToolCall(id=growing.id, function=FunctionCall(name=growing.name, arguments=arguments))
    return call, not growing.is_whole
