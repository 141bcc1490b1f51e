"""The routes. Each says what it takes and what it answers, and ``/openapi.json`` says the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from optimized.async_llm import AsyncLLM
from optimized.doctor import version_of
from optimized.fault_points import FaultPoint, reach
from optimized.generation_defaults import fill
from optimized.server.answers import (
    ChatAnswer,
    CompletionAnswer,
    Load,
    ModelCard,
    ModelList,
    Status,
    Text,
    TokenizerInfo,
    Tokens,
    Version,
)
from optimized.server.errors import TYPES, ErrorBody, RequestError, told
from optimized.server.front import Front
from optimized.server.guard import OPEN_PATHS, Guard
from optimized.server.limits import Limits
from optimized.server.page import LiveMap, html_of
from optimized.server.readers import Readers
from optimized.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from optimized.server.service import Service, begun_late, unless_gone
from optimized.server.stream import EVENT_SCHEMA, EventStream, kept_alive

logger = logging.getLogger(__name__)

MOST_OF_A_NAME = 100
"""Characters of a field's name that are said back."""

CLIENT_GONE = 499
"""For logs: nobody is there to read it."""


def make_app(
    engine: AsyncLLM,
    names: Sequence[str],
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    front: Front | None = None,
) -> tuple[Guard, Service]:
    """The application, behind its guard, and the service that it calls."""
    front = front or Front()
    readers = Readers()
    service = Service(engine, names, limits or Limits(), front, readers)
    errors: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in sorted(TYPES)}
    schema_path = None if front.disable_fastapi_docs else "/openapi.json"
    app = FastAPI(
        title="kvproof",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=schema_path,
        servers=[{"url": front.root_path}] if front.root_path else None,
        responses=errors,
    )
    app.router.redirect_slashes = False  # where to is made from the Host header, and no route says that it does
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]

    @app.post("/v1/completions", response_model=CompletionAnswer, response_model_exclude_none=False)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        request_id = request.state.request_id
        service.salt(body, request.state.key)
        fill(body, engine.llm.defaults)
        if body.stream:
            return await _streamed(request, service.stream_completion(body, request_id), front)
        return await _whole(request, service.complete(body, request_id))

    @app.post("/v1/chat/completions", response_model=ChatAnswer)
    async def chat(body: ChatRequest, request: Request) -> Any:
        request_id = request.state.request_id
        service.salt(body, request.state.key)
        fill(body, engine.llm.defaults)
        if body.stream:
            return await _streamed(request, service.stream_chat(body, request_id), front)
        return await _whole(request, service.chat(body, request_id))

    def card(name: str) -> ModelCard:
        llm = engine.llm
        return ModelCard(
            id=name,
            created=service.created,
            root=llm.checkpoint.name,
            max_model_len=llm.config.max_model_len,
            default_sampling_params=dict(llm.defaults),
        )

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[card(name) for name in service.names])

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> ModelCard:
        service.check_model(model_id)
        return card(model_id)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        service.check_model(body.model)
        ids = await engine.tokenize(body.prompt, body.add_special_tokens)
        return Tokens(tokens=ids, count=len(ids), max_model_len=engine.llm.config.max_model_len)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Text:
        service.check_model(body.model)
        return Text(prompt=await engine.detokenize(body.tokens))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        return service.tokenizer_info()

    @app.get("/health")
    async def health() -> Status:
        found = engine.health
        if not found.is_running and not service.is_draining:
            raise RequestError(503, "engine_stopped", "the engine is not running")
        idle = found.seconds_without_progress
        if idle is not None and idle > service.limits.stall_seconds:
            raise RequestError(503, "stalled", f"there is work, and no step has ended for {idle:.0f} s")
        return Status(status="ok")

    @app.get("/ping")
    async def ping() -> Status:
        return await health()

    @app.get("/load")
    async def load() -> Load:
        return Load(server_load=engine.health.num_unfinished)

    @app.get("/ready")
    async def ready() -> Status:
        if service.is_draining or not engine.is_running:
            raise RequestError(503, "draining", "the server takes no requests")
        return Status(status="ok")

    @app.get("/version")
    async def version() -> Version:
        return Version(version=_version())

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    if front.renderer is not None:
        html, live = html_of(service.names[0], front.renderer.style), LiveMap(engine, front.renderer)

        @app.get("/", include_in_schema=False)
        async def built_in_page() -> Response:
            return html

        @app.get("/map", include_in_schema=False)
        async def live_map() -> Response:
            return EventStream(await live.events(lambda: service.is_draining))

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return _response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _response(_first(error))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        status = error.status_code if error.status_code in TYPES else 400
        codes = {404: "not_found", 405: "method_not_allowed"}
        made = _response(RequestError(status, codes.get(status, "bad_request"), str(error.detail)))
        made.headers.update(error.headers or {})  # a 405 says what is allowed
        return made

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _told(request, error)

    open_paths = OPEN_PATHS | ({"/metrics"} if front.metrics_public else frozenset())
    return Guard(app, service.limits, keys, service.demand_room, open_paths, front.root_path, readers), service


def _version() -> str:
    return version_of("kvproof") or "0"


def _response(error: RequestError) -> Response:
    return JSONResponse(ErrorBody(error=error.detail).model_dump(), error.status, headers=error.headers)


def _told(request: Request, error: Exception) -> Response:
    """The answer to an error; one that is ours goes to the log, under the id that the client has."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        error = RequestError(408, "timeout", "the request took too long")
    found = told(error)
    if found.status == 500:
        logger.error("request %s failed", request.state.request_id, exc_info=error)
    return _response(found)


def _first(error: RequestValidationError) -> RequestError:
    """The first thing that is wrong with a body, in one sentence that names the field."""
    found = error.errors()[0]
    place = [str(part)[:MOST_OF_A_NAME] for part in found["loc"] if part != "body"]
    field = place[0] if place else None
    if found["type"] == "json_invalid":
        return RequestError(400, "invalid_json", "the body is not valid JSON")
    if found["type"] == "extra_forbidden":
        return RequestError(400, "unsupported_parameter", f"{'.'.join(place)} is not supported", field)
    if found["type"] == "missing":
        return RequestError(400, "missing_parameter", f"{'.'.join(place) or 'the body'} is missing", field)
    return RequestError(400, "invalid_value", f"{'.'.join(place) or 'the body'}: {found['msg']}", field)


async def _whole(request: Request, work: Awaitable[Any]) -> Any:
    """The answer, unless its client goes away, which ends the work."""
    try:
        answer = await unless_gone(work, _disconnected(request))
    except Exception as error:  # noqa: BLE001  an error of one request is told to its client
        return _told(request, error)
    reach(FaultPoint.MAKE_ANSWER)
    return Response(status_code=CLIENT_GONE) if answer is None else JSONResponse(answer.model_dump())


async def _streamed(request: Request, work: Awaitable[AsyncIterator[bytes]], front: Front) -> Response:
    """The stream, once its first output is there, or it is time to say that there will be one."""
    interval = front.sse_keep_alive_interval
    begin = asyncio.ensure_future(work)
    is_here = await unless_gone(asyncio.wait({begin}, timeout=interval or None), _disconnected(request))
    if is_here is None:
        begin.cancel()
        await asyncio.gather(begin, return_exceptions=True)  # so that nobody's error is told to the log by asyncio
        return Response(status_code=CLIENT_GONE)
    if not begin.done():
        return EventStream(kept_alive(begun_late(begin, request.state.request_id), interval), begin)
    try:
        events = begin.result()
    except Exception as error:  # noqa: BLE001
        return _told(request, error)
    return EventStream(kept_alive(events, interval) if interval else events)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, without the status that we never answer with, and with the streams."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=app.servers)
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                if "requestBody" in operation and "/completions" in operation["operationId"].replace("_", "/"):
                    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": EVENT_SCHEMA}
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
        app.openapi_schema = made
    return app.openapi_schema
