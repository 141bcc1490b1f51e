"""The bodies of requests, field by field. What is not here is refused by name, and nothing is ignored in silence."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from optimized.sampling import SamplingParams
from optimized.server.errors import RequestError, unsupported
from optimized.server.json_types import Finite, Flag, Many, TokenId, Whole, whole
from optimized.server.limits import Limits
from optimized.server.structure import ResponseFormat, StructuredOutputs, structure_of
from optimized.server.tools import SaidCall, Tool, ToolChoice, call_of_one, callable_tools, form_of_arguments
from optimized.structured_outputs import StructuredOutputsParams

Prompts: TypeAlias = str | Many[str] | Many[TokenId] | Many[Many[TokenId]]
PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
)
"""Fields that mean the same in ``SamplingParams``."""


MOST_ERRORS = 100
"""So many wrong things of a body may be listed, of which the first is told; to list more takes long."""


class Body(BaseModel):
    """A body: its fields and no others."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _few_errors(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """To describe each of a million wrong things would hold everybody up for a minute."""
        if isinstance(data, dict):  # JSON has one kind of numbers: some clients write 3.0 where others write 3
            data = {name: whole(value) for name, value in data.items()}
        try:
            return handler(data)
        except ValidationError as error:
            if (count := error.error_count()) > MOST_ERRORS:
                raise ValueError(f"{count} things are wrong with it") from None
            raise


class StreamOptions(BaseModel):
    """What a stream says besides its text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class SamplingFields(Body):
    """What both kinds of completions may ask of sampling."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str | None = None
    temperature: Finite | None = Field(None, ge=0.0)
    top_p: Finite | None = Field(None, gt=0.0, le=1.0)
    n: Whole | None = Field(None, ge=1, lt=1 << 31)
    max_tokens: Whole | None = Field(None, ge=1, lt=1 << 31)
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    stop: str | Many[str] | None = None
    seed: Whole | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    presence_penalty: Finite | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: Finite | None = Field(None, ge=-2.0, le=2.0)
    logit_bias: dict[str, Finite] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's own
    structured_outputs: StructuredOutputs | None = None
    top_k: Whole | None = Field(None, ge=-1, lt=1 << 31)
    min_p: Finite | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: Finite | None = Field(None, ge=0.01, le=100.0)
    min_tokens: Whole | None = Field(None, ge=0, lt=1 << 31)
    ignore_eos: Flag | None = None
    stop_token_ids: Many[TokenId] | None = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    allowed_token_ids: Many[TokenId] | None = None
    bad_words: Many[str] | None = None
    prompt_logprobs: Whole | None = Field(None, ge=0, lt=1 << 31)
    cache_salt: str | None = Field(None, min_length=1, pattern="^[ -~]+$")
    truncate_prompt_tokens: Whole | None = Field(None, ge=-1, lt=1 << 31)
    priority: Whole | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    return_token_ids: Flag | None = None
    # Said by clients without being asked, and of no meaning here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Flag | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_limits(self, limits: Limits, **counts: int | None) -> None:
        """Raise for more than this server gives. ``counts`` are fields that have ``max_logprobs`` for their limit."""
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens is 0, which leaves nothing of a prompt; -1 is what there is room for"
            raise RequestError(400, "invalid_value", message, "truncate_prompt_tokens")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for field, count, limit in (
            ("n", self.choices, "max_n"),
            ("stop", len(stop), "max_stop_strings"),
            ("stop", max(map(len, stop), default=0), "max_stop_characters"),
            ("stop_token_ids", len(self.stop_token_ids or ()), "max_stop_token_ids"),
            ("logit_bias", len(self.logit_bias or ()), "max_logit_biases"),
            ("bad_words", len(self.bad_words or ()), "max_bad_words"),
            ("prompt_logprobs", self.prompt_logprobs or 0, "max_logprobs"),
            *((field, count or 0, "max_logprobs") for field, count in counts.items()),
        ):
            most: int = getattr(limits, limit)
            if count > most:
                raise RequestError(400, "invalid_value", f"{field}: {count} is more than {most} ({limit})", field)

    def check_structure(self, limits: Limits) -> None:
        """Raise for a grammar that is more than this server makes."""
        by_kind = {"regex": "max_regex_bytes", "json": "max_schema_bytes"}
        for asked in self.forms():
            size = len(asked.text.encode("utf-8", "surrogatepass"))
            for what, count, limit in (
                (f"bytes of {asked.kind}", size, by_kind.get(asked.kind, "max_grammar_bytes")),
                ("brackets inside each other", asked.depth, "max_schema_depth"),
            ):
                most: int = getattr(limits, limit)
                if count > most:
                    message = f"{asked.asked_as}: {count:,} {what} are more than {most:,} ({limit})"
                    raise RequestError(400, "grammar_too_complex", message, asked.asked_as)

    def check_stream(self) -> None:
        """Raise if options of a stream are given where there is none."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(400, "invalid_value", "stream_options is for streams only", "stream_options")

    def forms(self) -> list[StructuredOutputsParams]:
        """What has limits of what answers look like. Raises ``InvalidField``."""
        asked = self.structure()
        return [] if asked is None else [asked]

    def structure(self) -> StructuredOutputsParams | None:
        """What answers look like. Raises ``InvalidField``."""
        return structure_of(self.response_format, self.structured_outputs)

    def sampling(self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The parameters for the engine. Raises ``InvalidField``."""
        given: dict[str, Any] = {  # fields of SamplingParams
            name: getattr(self, name) for name in PASSED_ON if getattr(self, name) is not None
        }
        if self.seed is not None:
            given["seed"] = self.seed % (1 << 64)
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(text): bias for text, bias in self.logit_bias.items()}
        given["structured_outputs"] = self.structure()
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise RequestError(
            400, "invalid_value", f"logit_bias has the key {text[:40]!r}, keys are token ids", "logit_bias"
        )
    return int(text)


class CompletionRequest(SamplingFields):
    """The body of ``/v1/completions``."""

    prompt: Prompts
    echo: Flag | None = None
    logprobs: Whole | None = Field(None, ge=0, lt=1 << 31)
    best_of: Whole | None = Field(None, ge=1, lt=1 << 31)
    suffix: str | None = None
    add_special_tokens: Flag | None = None

    def prompts(self) -> list[str | list[int]]:
        """The four shapes of a prompt as one list."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise RequestError(400, "invalid_value", "prompt is empty, at least one is needed", "prompt")
        ids = [each for each in given if isinstance(each, int)]
        return [ids] if ids else [each for each in given if not isinstance(each, int)]

    def check(self) -> None:
        """Raise for what would have to be ignored."""
        self.check_stream()
        if self.suffix:
            raise unsupported("suffix", "is not supported")
        if self.best_of is not None and self.best_of != self.choices:
            raise unsupported("best_of", f"is {self.best_of}, only n ({self.choices}) is supported")
        if self.echo and self.stream:
            raise unsupported("echo", "is not supported in a stream")


class Message(BaseModel):
    """One message of a conversation: text only."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    # What openai-python's answers have in them, of which ours have nothing, in the words of its model_dump().
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[SaidCall] | None = Field(None, max_length=64)
    tool_call_id: str | None = None
    # The content once more, as openai-python has read it.
    parsed: Any = None

    @property
    def text(self) -> str:
        """The text of all its parts."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        said: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            said["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            said["tool_call_id"] = self.tool_call_id
        return said


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class ChatRequest(SamplingFields):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: Whole | None = Field(None, ge=1, lt=1 << 31)
    logprobs: Flag | None = None
    top_logprobs: Whole | None = Field(None, ge=0, lt=1 << 31)
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = None

    def check(self) -> None:
        """Raise for what would have to be ignored."""
        self.check_stream()
        if self.continue_final_message:
            if self.add_generation_prompt:
                message = "continue_final_message goes on with the last message, add_generation_prompt begins another"
                raise RequestError(400, "invalid_value", message, "continue_final_message")
            if self.messages[-1].role != "assistant" or not self.messages[-1].text.strip():
                message = "continue_final_message needs a last message of the assistant, with a text"
                raise RequestError(400, "invalid_value", message, "continue_final_message")
        tools = callable_tools(self.tools, self.tool_choice)
        if tools and (super().structure() is not None or self.stop):
            raise RequestError(400, "invalid_value", "a tool call has no other form and no other end", "tool_choice")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(400, "invalid_value", "top_logprobs needs logprobs", "top_logprobs")

    @property
    def most_tokens(self) -> int | None:
        """The newer field wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def calls(self) -> bool:
        """Whether answers are tool calls."""
        return bool(callable_tools(self.tools, self.tool_choice))

    def forms(self) -> list[StructuredOutputsParams]:
        # Each schema by itself, too: in the grammar of all tools it has no depth.
        tools = callable_tools(self.tools, self.tool_choice)
        return [*map(form_of_arguments, tools), *super().forms()]

    def structure(self) -> StructuredOutputsParams | None:
        tools = callable_tools(self.tools, self.tool_choice)
        return call_of_one(tools) if tools else super().structure()

    def conversation(self) -> list[dict[str, Any]]:
        """The messages for the chat template."""
        return [each.for_template() for each in self.messages]

    def told_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template, if the model may call one."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()] if self.calls else None


class TokenizeRequest(Body):
    """The body of ``/tokenize``."""

    model: str | None = None
    prompt: str
    add_special_tokens: Flag = True


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Many[TokenId]
