"""The live requests and their sequences: who waits, who runs, and in which order they are served."""

from dataclasses import replace

from spec.vocabulary import Config, Policy, Request, RequestId, Seq, SeqId, Token


class Roster:
    """Requests in the order of arrival, sequences in the order in which they were made, two queues in the order of
    service."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.requests: dict[RequestId, Request] = {}
        self.seqs: dict[SeqId, Seq] = {}
        self.waiting: list[RequestId] = []
        self.running: list[RequestId] = []
        self.num_preemptions: dict[RequestId, int] = {}

    def service_order(self, request_id: RequestId) -> tuple[int, int]:
        """Smaller is served first."""
        by_priority = self.config.policy is Policy.PRIORITY
        priority = self.requests[request_id].priority if by_priority else 0
        return priority, list(self.requests).index(request_id)

    def seqs_of(self, request_id: RequestId) -> list[SeqId]:
        """The live sequences of a request, the oldest first."""
        return [seq_id for seq_id, seq in self.seqs.items() if seq.request_id == request_id]

    def request_of(self, seq_id: SeqId) -> Request:
        return self.requests[self.seqs[seq_id].request_id]

    def unborn(self, request_id: RequestId) -> tuple[SeqId, ...]:
        """The sequences that are still to be forked from the prompt: all but the first, until that has an output."""
        request = self.requests[request_id]
        first = self.seqs.get(request.seq_ids[0])
        if first is None or first.num_output_tokens > 0:
            return ()
        return request.seq_ids[1:]

    def seats(self, request_id: RequestId) -> int:
        """How many of the ``max_num_seqs`` the request takes while it runs."""
        return len(self.seqs_of(request_id)) + len(self.unborn(request_id))

    def seats_taken(self) -> int:
        return sum(self.seats(request_id) for request_id in self.running)

    def seq_ids_in_use(self) -> set[SeqId]:
        """The ids that a new sequence must not have: the live ones, and those promised to unborn ones."""
        return set(self.seqs).union(*(self.unborn(request_id) for request_id in self.requests))

    def add(self, request: Request) -> None:
        """The request waits, behind everybody who is served before it."""
        self.requests[request.request_id] = request
        seq = Seq(request.request_id, request.prompt, num_prompt_tokens=len(request.prompt))
        self.seqs[request.seq_ids[0]] = seq
        self.waiting.append(request.request_id)
        self.waiting.sort(key=self.service_order)

    def admit(self, request_id: RequestId) -> None:
        self.waiting.remove(request_id)
        self.running.append(request_id)
        self.running.sort(key=self.service_order)

    def preempt(self, request_id: RequestId) -> None:
        self.running.remove(request_id)
        self.waiting.append(request_id)
        self.waiting.sort(key=self.service_order)
        self.num_preemptions[request_id] = self.num_preemptions.get(request_id, 0) + 1

    def append(self, seq_id: SeqId, token: Token) -> None:
        seq = self.seqs[seq_id]
        self.seqs[seq_id] = replace(seq, tokens=(*seq.tokens, token))

    def remove(self, seq_id: SeqId) -> None:
        """The sequence is gone; with the last one of a request, so is the request."""
        request_id = self.seqs.pop(seq_id).request_id
        if self.seqs_of(request_id):
            return
        del self.requests[request_id]
        self.num_preemptions.pop(request_id, None)
        for queue in (self.waiting, self.running):
            if request_id in queue:
                queue.remove(request_id)
