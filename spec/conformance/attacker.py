"""A caller who means harm: sends any bytes at all, and says what came back, however it came."""

import json
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, Self
from urllib.parse import urlsplit

from spec.conformance.served_client import Server

PATIENCE_S = 30.0
CHUNK = 1 << 16


@dataclass(frozen=True)
class Answer:
    """What a server answered; ``status`` is None where it hung up, and ``is_late`` where it did nothing at all in time.

    ``was_read`` says that it took all that was sent.
    """

    status: int | None
    body: bytes = b""
    is_late: bool = False
    was_read: bool = False

    @property
    def is_refusal(self) -> bool:
        """Whether nothing was done: a status from 400 to 499, or no answer and a closed connection."""
        return not self.is_late and (self.status is None or 400 <= self.status < 500)

    def __str__(self) -> str:
        if self.is_late:
            return "no answer in time"
        return "the connection was closed" if self.status is None else f"{self.status} {self.body[:200]!r}"


class Attacked:
    """A server that is attacked, with the keys that are known of it. Each attack has a connection of its own."""

    def __init__(self, url: str, keys: Iterable[str] = (), *, patience_s: float = PATIENCE_S) -> None:
        self.url = url.rstrip("/")
        self.keys = tuple(keys)
        self.patience_s = patience_s
        self.caller = Server(self.url, timeout_s=patience_s, key=self.keys[0] if self.keys else None)
        parts = urlsplit(self.url)
        self.path, self._is_tls = parts.path, parts.scheme == "https"
        self._address = parts.hostname or "", parts.port or (443 if self._is_tls else 80)

    def post(self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        """A request of OpenAI's kind with these fields, to a path below the address of the server."""
        data = json.dumps({"model": self.caller.model, **fields}).encode()
        return self.ask("POST", self.path + path, data, headers)

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        with_key: bool = True,
    ) -> Answer:
        """A request with any headers; those of its body, its key and its host are made up where none are given."""
        said = {"Host": f"{self._address[0]}:{self._address[1]}", "Connection": "close"}
        if body is not None:
            said |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        if self.keys and with_key:
            said["Authorization"] = f"Bearer {self.keys[0]}"
        said |= headers or {}
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in said.items() if value)]
        return self.send("\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + (body or b""))

    def send(self, data: bytes) -> Answer:
        """The answer to these bytes. What is not taken is not sent to the end."""
        try:
            with self._connected() as connection:
                return self._answered(connection, data)
        except TimeoutError:
            return Answer(None, is_late=True)
        except (OSError, HTTPException):
            return Answer(None)

    def begin(self, data: bytes) -> None:
        """Ask, wait for the first bytes of an answer, and go away."""
        try:
            with self._connected() as connection:
                connection.sendall(data)
                connection.recv(1)
        except OSError:
            return

    def control(self, prompt: str = "The capital of France is") -> str:
        """What a harmless caller is answered. Raises ``ServerFault`` if that is nothing."""
        return self.caller.complete(prompt, temperature=0, max_tokens=8).choices[0].text

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=self.patience_s)
        if self._is_tls:
            return ssl.create_default_context().wrap_socket(connection, server_hostname=self._address[0])
        return connection

    def _answered(self, connection: socket.socket, data: bytes) -> Answer:
        was_read = True
        try:
            for start in range(0, len(data), CHUNK):
                if select.select([connection], [], [], 0)[0]:
                    was_read = False  # it has answered already, or hung up
                    break
                connection.sendall(data[start : start + CHUNK])
        except (BrokenPipeError, ConnectionResetError):
            was_read = False  # there may be an answer all the same
        response = HTTPResponse(connection)
        response.begin()
        return Answer(response.status, response.read(), was_read=was_read)


class Listener:
    """A port of this machine. Whoever connects to it was made to do so by what we sent to somebody else."""

    def __init__(self) -> None:
        self.was_called = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            while True:
                self._socket.accept()[0].close()
                self.was_called.set()
        except OSError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not wake who waits for a caller
        self._thread.join()
        self._socket.close()
