"""A server process: load the model, say what there is, listen until a signal comes, let the rest finish."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import resource
import socket
import ssl
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType

import uvicorn

from optimized.async_llm import AsyncLLM
from optimized.capacity import pool_sentence
from optimized.chat_template import TemplateLimits
from optimized.grammar import GrammarLimits
from optimized.llm import LLM
from optimized.server.app import make_app
from optimized.server.connection import connection_class
from optimized.server.front import Front
from optimized.server.guard import Guard
from optimized.server.heartbeat import beat_for_ever
from optimized.server.limits import Limits
from optimized.server.service import Service
from spec.vocabulary import InvalidConfig

SECONDS_TO_TELL = 5
"""After the time to finish is over, requests are ended by us, and their clients told; uvicorn would only hang up."""

OTHER_FILES = 256
"""Files that are open besides connections: a usual limit of 1,024 would be met before that of connections."""

FULL_STEPS = 8
"""So many steps' worth of prompts may wait, unless ``max_num_queued_tokens`` says something else."""


@dataclass(frozen=True)
class Address:
    """Where to listen, and who may ask. Beyond this machine only with keys, or with an explicit word."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Sequence[str] = field(default=(), repr=False)
    allow_unauthenticated: bool = False
    uds: str | None = None
    """A socket in the file system, instead of host and port."""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = ssl.CERT_NONE
    """Whether who asks shows a certificate of those authorities: 0 no, 1 if there is one, 2 always."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InvalidConfig("port", self.port, "from 0 to 65535")
        if any(not key.strip() for key in self.keys):
            raise InvalidConfig("api_key", "", "not empty")
        if self.ssl_cert_reqs not in tuple(ssl.VerifyMode):
            raise InvalidConfig("ssl_cert_reqs", self.ssl_cert_reqs, "0, 1 or 2")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise InvalidConfig("ssl_keyfile", self.ssl_keyfile, "given if and only if ssl_certfile is")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs):
            raise InvalidConfig("ssl_ca_certs", self.ssl_ca_certs, "left out without ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise InvalidConfig("ssl_cert_reqs", self.ssl_cert_reqs, "0 without ssl_ca_certs")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise InvalidConfig(name, path, "a file that is there")
        if self.uds is not None and (self.host, self.port) != ("127.0.0.1", 8000):
            raise InvalidConfig("uds", self.uds, "left out where host or port is given")
        if self.uds is not None and os.path.lexists(self.uds) and not _is_socket(self.uds):
            raise InvalidConfig("uds", self.uds, "a socket, or a name that nothing has")
        if self.uds is not None and _is_served(self.uds):
            raise InvalidConfig("uds", self.uds, "a socket on which nobody listens")
        if self.uds is not None and not os.path.isdir(os.path.dirname(self.uds) or "."):
            raise InvalidConfig("uds", self.uds, "in a folder that is there")
        if not _is_loopback(self.host) and not self.keys and not self.allow_unauthenticated:
            raise InvalidConfig("host", self.host, "a loopback address, or with an API key, or --allow-unauthenticated")

    @property
    def is_open(self) -> bool:
        """Whether others than this machine may ask without a key."""
        return not _is_loopback(self.host) and not self.keys


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:  # a link that leads nowhere
        return False


def _is_served(path: str) -> bool:
    """Whether somebody listens on this socket: uvicorn would take his place without a word. One that was left behind may be taken."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # more wait for him than he lets wait
            return True
        except OSError as error:
            raise InvalidConfig("uds", path, f"a path for a socket ({error.strerror or error})") from error
    return True


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(uvicorn.Server):
    """A first signal lets requests finish, a second one ends them, a third one waits for nobody."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.is_aborting = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # It listens until requests have ended: whoever asks is told that it is not ready, and not left without an answer.
        self.force_exit = self.is_aborting
        self.is_aborting = self._service.is_draining
        self._service.is_draining = True
        del sig, frame


def serve(
    llm: LLM,
    names: Sequence[str],
    address: Address,
    limits: Limits,
    say: Callable[[str], None],
    front: Front | None = None,
) -> None:
    """Serve until a signal comes. ``say`` gets the lines for whoever started it."""
    engine = make_engine(llm, limits)
    app, service = make_app(engine, names, limits, address.keys, front)
    server = _Server(uvicorn_config(app, address, limits), service)
    say(pool_sentence(names[0], llm.config))
    allow_open_files(limits.max_connections + OTHER_FILES)
    if address.is_open:
        say(f"warning: everybody who reaches {address.host} may ask, there is no key")
    asyncio.run(_run(server, service, address, limits, say))


def allow_open_files(count: int) -> None:
    """Let this process have so many files and connections open, as far as whoever started it lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def make_engine(llm: LLM, limits: Limits, restarts: bool = True) -> AsyncLLM:
    """The engine with the server's queue."""
    most_tokens = limits.max_num_queued_tokens or FULL_STEPS * llm.config.max_num_batched_tokens
    llm.grammars.limits = GrammarLimits(limits.grammar_timeout_ms, limits.grammar_cache_bytes)
    of_templates = TemplateLimits(limits.template_fuel, limits.max_template_characters)
    llm.checkpoint = replace(llm.checkpoint, template_limits=of_templates)
    return AsyncLLM(
        llm, limits.max_num_queued_reqs, most_tokens, restarts, grammars_at_once=limits.max_grammars_at_once
    )


def uvicorn_config(app: Guard, address: Address, limits: Limits) -> uvicorn.Config:
    """How connections are read: by h11, which bounds a head, and by ours, which bounds its time."""
    return uvicorn.Config(
        app,
        host=address.host,
        port=address.port,
        uds=address.uds,
        ssl_keyfile=address.ssl_keyfile,
        ssl_certfile=address.ssl_certfile,
        ssl_ca_certs=address.ssl_ca_certs,
        ssl_cert_reqs=address.ssl_cert_reqs,
        http=connection_class(limits, app.readers),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=True,
        h11_max_incomplete_event_size=limits.max_head_bytes,
        timeout_keep_alive=limits.keep_alive_timeout,
        timeout_graceful_shutdown=limits.shutdown_timeout + SECONDS_TO_TELL,
        limit_concurrency=limits.max_connections + 1,  # uvicorn counts whoever asks
    )


def bound_handshakes(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Let a TLS handshake take so long. asyncio gives it a minute, uvicorn has no word for that, and to us it is no connection before."""
    for name in ("create_server", "create_unix_server"):
        setattr(loop, name, partial(getattr(loop, name), ssl_handshake_timeout=seconds))


async def _run(server: _Server, service: Service, address: Address, limits: Limits, say: Callable[[str], None]) -> None:
    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        if address.uds is not None:
            say(f"listening on the socket {address.uds}")
            return
        sockets = [each.getsockname() for listening in server.servers for each in listening.sockets]
        port = sockets[0][1] if sockets else address.port
        host = f"[{address.host}]" if ":" in address.host else address.host
        say(f"listening on {'http' if address.ssl_certfile is None else 'https'}://{host}:{port}")

    if address.ssl_certfile is not None:
        bound_handshakes(asyncio.get_running_loop(), limits.head_timeout)
    ending = _end_in_time(server, service, limits.shutdown_timeout)
    beating = [asyncio.ensure_future(each) for each in (announce(), beat_for_ever(service.engine), ending)]
    try:
        await server.serve()
    finally:
        for task in beating:
            task.cancel()
        if address.uds is not None:
            _leave(address.uds)
        await service.engine.shutdown()


def _leave(path: str) -> None:
    """The socket's file goes with its server, which asyncio leaves there; unless somebody else listens on it by now."""
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_served(path):
            os.unlink(path)
    except (OSError, InvalidConfig):  # somebody else has seen to it
        return


async def _end_in_time(server: _Server, service: Service, seconds: float) -> None:
    """After a signal, requests have so long, or until the next signal; those that are left are told, and it listens no more."""
    while not service.is_draining:
        await asyncio.sleep(0.05)
    deadline, engine = time.monotonic() + seconds, service.engine
    while engine.health.num_unfinished and not server.is_aborting and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    await engine.shutdown()
    left = 0.0 if server.is_aborting else max(0.0, deadline - time.monotonic())  # for whoever still reads an answer
    server.config.timeout_graceful_shutdown = math.ceil(left) + SECONDS_TO_TELL
    server.should_exit = True
