"""A connection, for uvicorn: whoever takes too long to say what they want is told so, and leaves."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from optimized.server.limits import Limits
from optimized.server.readers import Reader, Readers

SECONDS_TO_LEAVE = 1.0
LEAST_READ = 4096
"""Bytes that a client must have read in ``send_timeout`` seconds, if so many wait for it."""


def connection_class(limits: Limits, readers: Readers) -> type[H11Protocol]:
    """uvicorn's connection with our limits: it has none of its own on how long a request's head may take."""

    class Connection(H11Protocol):
        """From its first byte, or from the beginning of a connection, a head has ``head_timeout`` seconds."""

        _deadline: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None
        _reader: Reader

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=limits.stream_buffer_bytes)
            self._reader = Reader(transport)
            readers.connected.add(self._reader)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            readers.connected.discard(self._reader)
            if self._stalled is not None:
                self._stalled.cancel()
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            if self.conn.our_state is h11.DONE:
                # It is answered, and nobody wants the rest of its body: uvicorn would wait for that for ever.
                if self._deadline is None:
                    self._deadline = self.loop.call_later(limits.body_timeout, self._too_late)
            elif self.conn.their_state is not h11.IDLE:
                self._stop_waiting()
            elif self._deadline is None and (self.conn.trailing_data[0] or self.timeout_keep_alive_task is None):
                self._expect_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader.is_stalled = True
            readers.num_stalls += 1
            self._expect_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reader.is_stalled = False
            if self._stalled is not None:
                self._stalled.cancel()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            # What is left of an answer that nobody reads would keep the connection for ever.
            self._expect_reader()

        def _expect_reader(self) -> None:
            """Whoever reads next to nothing for so long leaves; whoever reads slowly may stay."""
            if self._stalled is not None:
                self._stalled.cancel()
            unread = self.transport.get_write_buffer_size()
            self._stalled = self.loop.call_later(limits.send_timeout, self._judge_reader, unread)

        def _judge_reader(self, before: int) -> None:
            unread = self.transport.get_write_buffer_size()
            if unread and before - unread >= LEAST_READ:
                self._expect_reader()
            else:
                readers.num_given_up += unread > 0
                self.transport.abort()

        def _expect_head(self) -> None:
            self._deadline = self.loop.call_later(limits.head_timeout, self._too_late)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_late(self) -> None:
            self._deadline = None
            if self.transport.is_closing():
                return
            if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
                self.transport.write(_told(limits))
            self.transport.close()
            self.loop.call_later(SECONDS_TO_LEAVE, self.transport.abort)

    return Connection


def _told(limits: Limits) -> bytes:
    message = f"the headers did not come within {limits.head_timeout} s (head_timeout)"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "timeout"}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body
