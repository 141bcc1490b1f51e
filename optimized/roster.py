"""Who lives: requests and sequences, their places in the queues, their names, and what they hold."""

from __future__ import annotations

from collections import deque

from optimized.admission import may_fork, share
from optimized.counters import Counters
from optimized.door import check_fork, check_request, room_for_fork
from optimized.pool import BlockPool
from optimized.prefix_cache import PrefixCache
from optimized.sequences import LiveRequest, LiveSeq
from optimized.step import StepInFlight
from optimized.waiting import WaitingQueue
from spec.batches import BatchObserver
from spec.engine import Admission, InvalidField
from spec.vocabulary import (
    Abort,
    Add,
    BlockId,
    Config,
    Fork,
    Policy,
    Release,
    Request,
    RequestId,
    Reset,
    SeqId,
    StepId,
)


class Roster:
    """Requests come, are forked, and end; in between they wait or run. ``observer`` hears every event; without it none is
    made.

    ``model`` is the identity of the model: what the prefix cache holds is good for no other.
    """

    def __init__(self, config: Config, observer: BatchObserver | None = None, model: str = "") -> None:
        self.config = config
        self.cache = PrefixCache(config.num_blocks, config.block_size, model=model) if config.prefix_cache else None
        self.pool = BlockPool(config.num_blocks, self.cache)
        self.host_free = deque(range(config.num_host_blocks))
        self.waiting = WaitingQueue()
        self.running: list[LiveRequest] = []
        self.requests: dict[RequestId, LiveRequest] = {}
        self.seqs: dict[SeqId, LiveSeq] = {}
        self.flights: dict[StepId, StepInFlight] = {}
        self.counters = Counters()
        self._observer = observer
        self._emit = observer.event if observer is not None else None
        self._promised: set[SeqId] = set()  # ids of sequences that are still to be forked
        self._seats_taken = 0
        self._share = share(config)
        self._num_arrivals = 0

    # --- coming -------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """The request waits. O(prompt). Raises ``InvalidRequest`` and changes nothing if it can never be served."""
        self.check(request)
        priority = request.priority if self.config.policy is Policy.PRIORITY else 0
        chain = [] if self.cache is None else [self.cache.root(request.cache_salt)]
        live = LiveRequest(request, (priority, self._num_arrivals), chain)
        self._num_arrivals += 1
        self.requests[request.request_id] = live
        self.seqs[request.seq_ids[0]] = live.seqs[0]
        self._promised.update(request.seq_ids[1:])
        self.waiting.push(live)
        if self._emit is not None:
            self._emit(Add(request))

    def check(self, request: Request) -> None:
        """Raise ``InvalidRequest`` unless the request can be served to its end, under ids that are new (SCHED-8)."""
        check_request(self.config, request, self.requests, self._is_new)

    def _is_new(self, seq_id: SeqId) -> bool:
        in_flight = any(seq_id in step.gone for step in self.flights.values())
        return not in_flight and not self._is_known(seq_id)

    def _is_known(self, seq_id: SeqId) -> bool:
        return seq_id in self.seqs or seq_id in self._promised

    def fork(self, parent_id: SeqId, child_id: SeqId) -> Admission:
        """The child shares the parent's table and tokens. O(tokens / block size); anything but NOW changes nothing."""
        parent = check_fork(self.seqs, parent_id, child_id, self._is_new)
        answer = room_for_fork(self.config, parent.request, self._seats_taken)
        if answer is Admission.NOW and not may_fork(self.config, self.pool, self.running, parent):
            answer = Admission.LATER
        if answer is not Admission.NOW:
            return answer
        self._seats_taken += 1
        self._fork(parent, child_id)
        return Admission.NOW

    def _fork(self, parent: LiveSeq, child_id: SeqId) -> LiveSeq:
        child = parent.fork(child_id)
        self.pool.share(child.table)
        parent.request.seqs.append(child)
        self.seqs[child_id] = child
        if self._emit is not None:
            self._emit(Fork(parent.seq_id, child_id))
        return child

    # --- what a sequence holds ----------------------------------------------------------------------------------------

    def _drop_host_table(self, seq: LiveSeq) -> None:
        self.host_free.extend(seq.host_table)
        seq.host_table = ()

    def _drop_table(self, seq: LiveSeq) -> None:
        self._give_back(seq, seq.table)
        seq.table = ()

    def _give_back(self, seq: LiveSeq, blocks: tuple[BlockId, ...]) -> None:
        """Blocks leave the sequence's table: at once, or with the steps that may still touch them (ALLOC-5)."""
        if seq.num_scheduled:
            for step in self.flights.values():
                if seq in step.scheduled:
                    self.pool.submitted[step.step_id].blocks.update(blocks)
        self.pool.release(blocks)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, request_id: RequestId) -> None:
        """The request ends. What it holds is free at once, or with the step that may still touch it.

        An unknown id is ignored. O(what it holds), O(sequences in flight) if it is in flight.
        """
        if request_id in self.requests:
            self._end_request(self.requests[request_id])

    def release(self, seq_id: SeqId) -> None:
        """The caller has enough of one sequence (a stop string came). An unknown id is ignored."""
        seq = self.seqs.get(seq_id)
        if seq is None:
            return
        if seq.request.num_unborn:
            raise InvalidField("seq_id", seq_id, "a sequence with output")
        self._release(seq)

    def _release(self, seq: LiveSeq) -> None:
        self._tear(seq)
        self._end_seq(seq)
        if self._emit is not None:
            self._emit(Release(seq.seq_id))
        self._forget_ended()

    def reset_cache(self) -> bool:
        """The prefix cache is emptied; False, and nothing changes, while one of its blocks is in use. O(cached)."""
        if self.cache is not None:
            if self.pool.num_in_use(self.cache.cached_blocks()):
                return False
            self.cache.clear()
        if self._emit is not None:
            self._emit(Reset())
        return True

    def _end_request(self, request: LiveRequest) -> None:
        self._promised.difference_update(request.request.seq_ids if request.num_unborn else ())
        for seq in tuple(request.seqs):
            self._tear(seq)
            self._end_seq(seq)
        if self._emit is not None:
            self._emit(Abort(request.request.request_id))
        self._forget_ended()

    def _tear(self, seq: LiveSeq) -> None:
        """Steps in flight go on without the sequence."""
        for step in self.flights.values():
            step.is_torn = True
            if seq.num_scheduled and seq in step.scheduled:
                step.gone.add(seq.seq_id)

    def _end_seq(self, seq: LiveSeq) -> None:
        """The sequence is gone; with the last one of a request, so is the request."""
        request = seq.request
        self._drop_table(seq)
        self._drop_host_table(seq)
        del self.seqs[seq.seq_id]
        request.seqs.remove(seq)
        if request.running:
            self._seats_taken -= 1
        if not request.seqs:
            del self.requests[request.request.request_id]
            if request.running:
                self._seats_taken -= request.num_unborn
                request.running = False
            else:
                self.waiting.remove(request)

    def _forget_ended(self) -> None:
        """Requests that have ended leave the running ones. O(running), for all that ended in a step."""
        self.running = [request for request in self.running if request.running]
