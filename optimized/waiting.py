"""The queue of waiting requests, in the order of service."""

from __future__ import annotations

import heapq

from optimized.sequences import LiveRequest


class WaitingQueue:
    """A heap by place in the order of service. Who leaves from the middle is only marked, and skipped at the head.

    Adding behind everybody is O(1), taking the head O(log n), leaving from the middle O(1) amortized; to look at the
    head costs the same however many wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], LiveRequest]] = []  # keys are unique: requests are never compared
        self._gone: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)

    def push(self, request: LiveRequest) -> None:
        heapq.heappush(self._heap, (request.key, request))

    def head(self) -> LiveRequest | None:
        """Who is served next."""
        while self._heap and self._heap[0][0] in self._gone:
            self._gone.remove(heapq.heappop(self._heap)[0])
        return self._heap[0][1] if self._heap else None

    def pop(self) -> LiveRequest:
        """The head leaves."""
        head = self.head()
        if head is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        return head

    def remove(self, request: LiveRequest) -> None:
        """A request leaves from wherever it stands."""
        self._gone.add(request.key)
        if 2 * len(self._gone) > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] not in self._gone]
            heapq.heapify(self._heap)
            self._gone.clear()

    def in_order(self) -> list[LiveRequest]:
        """Everybody who waits. O(n log n): for snapshots only."""
        return [request for key, request in sorted(self._heap) if key not in self._gone]
