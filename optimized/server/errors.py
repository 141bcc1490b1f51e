"""What goes wrong in a request, in OpenAI's shape: a status, a type and a code that stays, a sentence."""

from __future__ import annotations

from pydantic import BaseModel

from optimized.engine_thread import EngineBusy, EngineStopped
from optimized.structured_outputs import TooComplex
from spec.engine import InvalidField, InvalidRequest, PromptTooLong

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "server_error",
}
RETRY_AFTER_S = 1


class ErrorDetail(BaseModel):
    """What went wrong. ``param`` is the field, if it is about one."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is no answer."""

    error: ErrorDetail


class RequestError(Exception):
    """A request that gets no answer, with what its caller is told."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.ends_connection = False
        """Whether nothing else that its connection says is believed."""
        self.detail = ErrorDetail(message=message, type=TYPES[status], param=param, code=code)

    @property
    def headers(self) -> dict[str, str]:
        """Whether it is worth another try: openai-python heeds both."""
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_AFTER_S), "x-should-retry": "true"}
        if self.status == 401:
            # Basic, so that a browser asks its user for the key.
            return {"x-should-retry": "false", "www-authenticate": 'Basic realm="kvproof", charset="UTF-8"'}
        return {"x-should-retry": "false"}


def told(error: Exception) -> RequestError:
    """What a caller is told of an error. Of one that is ours no detail leaves the server."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, TooComplex):
        return RequestError(400, "grammar_too_complex", str(error), error.field)
    if isinstance(error, InvalidField):
        code = "context_length_exceeded" if "max_model_len" in str(error) else "invalid_value"
        return RequestError(400, code, str(error), error.field if error.field.isidentifier() else "prompt")
    if isinstance(error, PromptTooLong):
        return RequestError(400, "context_length_exceeded", str(error), "prompt")
    if isinstance(error, InvalidRequest | UnicodeError):
        return RequestError(400, "invalid_value", str(error))
    if isinstance(error, EngineBusy):
        return RequestError(503, "queue_full", str(error))
    if isinstance(error, EngineStopped):
        return RequestError(503, "engine_stopped", "the engine is not running")
    return RequestError(500, "internal_error", "the server has a bug; its log has the request id")


def unsupported(param: str, why: str) -> RequestError:
    """A field that would have to be ignored is refused by its name."""
    return RequestError(400, "unsupported_parameter", f"{param} {why}", param)
