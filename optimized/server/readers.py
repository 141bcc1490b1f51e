"""Who reads what the server says: how much waits for each client, and who has been given up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(eq=False)
class Reader:
    """One client's end of a connection."""

    transport: asyncio.Transport
    is_stalled: bool = False
    """Whether more waits for it than may, and so its answer waits, too."""

    @property
    def num_unread(self) -> int:
        """Bytes that wait for it in this process; what the system holds for it is not known here."""
        return self.transport.get_write_buffer_size()


@dataclass
class Readers:
    """The clients of one server. Everything happens in its event loop."""

    connected: set[Reader] = field(default_factory=set)
    num_stalls: int = 0
    """How often one of them began not to read."""
    num_given_up: int = 0

    @property
    def num_stalled(self) -> int:
        """How many clients do not read as fast as their answers grow."""
        return sum(each.is_stalled for each in self.connected)

    @property
    def most_unread(self) -> int:
        """The bytes that wait for the client for whom most do."""
        return max((each.num_unread for each in self.connected), default=0)
