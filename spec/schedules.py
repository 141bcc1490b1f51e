"""Every way in which a scheduler can go on under a small load, and the ways in which a request never ends (*lassos*)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from spec.canonical import Key
from spec.engine import Engine, EngineFactory, StepReport
from spec.replay import events_of_step, observe, step
from spec.rules import RuleViolation, check_rules
from spec.vocabulary import (
    Add,
    AdmissionRule,
    Config,
    Event,
    Observe,
    Policy,
    Prefix,
    Recovery,
    Request,
    RequestId,
    Sample,
    SeqId,
    State,
    Token,
)

Turn: TypeAlias = int | None
"""What happens next: a request of this kind arrives, or, if None, the engine makes a step."""

Place: TypeAlias = tuple[int, int]
"""A state by its number, and one of its requests by its place in the order of arrival."""


@dataclass(frozen=True)
class RequestKind:
    """A request as the load knows it."""

    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0

    def request(self, request_id: RequestId) -> Request:
        return Request(request_id, (0,) * self.num_prompt_tokens, self.max_tokens, (request_id,), (), self.priority)


@dataclass(frozen=True)
class Load:
    """A small engine, what may arrive, and how many requests may be there at a time. They arrive whenever they like,
    or never; the engine makes a step again and again; nobody aborts."""

    config: Config
    kinds: tuple[RequestKind, ...]
    max_requests: int = 4
    sentence: str = ""
    everyone_ends: bool = True
    """Whether the policy promises that every request ends."""


_THREE = Config(
    num_blocks=3,
    block_size=2,
    max_num_seqs=3,
    max_num_batched_tokens=3,
    admission_rule=AdmissionRule.OPTIMISTIC,
)
_KINDS = (RequestKind(1, 4), RequestKind(3, 3), RequestKind(2, 5))

LOADS: Mapping[str, Load] = {
    "fcfs": Load(_THREE, _KINDS, sentence="By arrival: chunked prefill, preemption of the newest, recomputation."),
    "recovery": Load(
        replace(_THREE, recovery=Recovery.SWAP, num_host_blocks=2),
        _KINDS,
        sentence="By arrival, with room in host memory for some of the victims.",
    ),
    "priority": Load(
        replace(_THREE, policy=Policy.PRIORITY),
        (RequestKind(1, 4, 0), RequestKind(3, 3, 1)),
        sentence="By priority: a newcomer may be more urgent than somebody who runs.",
        everyone_ends=False,
    ),
}
"""What the scheduler of an engine is looked at under."""


@dataclass(frozen=True)
class Edge:
    """A turn: where it leads, and which place each request has then that is still there."""

    turn: Turn
    target: int
    places: Mapping[int, int]


@dataclass
class Schedules:
    """The graph: for each state, up to the names of requests and blocks, its edges, and a shortest way to it."""

    load: Load
    edges: list[list[Edge]] = field(default_factory=list)
    path_to: list[tuple[Turn, ...]] = field(default_factory=list)
    num_requests: list[int] = field(default_factory=list)
    violation: RuleViolation | None = None
    path: tuple[Turn, ...] = ()

    @property
    def num_states(self) -> int:
        return len(self.edges)

    @property
    def num_edges(self) -> int:
        return sum(map(len, self.edges))

    @property
    def depth(self) -> int:
        return max(map(len, self.path_to), default=0)


@dataclass(frozen=True)
class Lasso:
    """A way to go on for ever while one request never ends: first ``stem``, then ``cycle`` again and again."""

    stem: tuple[Turn, ...]
    cycle: tuple[Turn, ...]
    place: int


def schedules(
    load: Load, make: EngineFactory, *, judged: bool = True, on_progress: Callable[[int], None] | None = None
) -> Schedules:
    """Visit every state that the engine can be in under the load, each turn judged by every rule; stop at the first
    violation. The engine is copied before each turn."""
    graph, engine = Schedules(load), make(load.config)
    numbers: dict[Key, int] = {}

    def enter(state: State, path: tuple[Turn, ...]) -> int:
        number = numbers.setdefault(schedule_key(state), graph.num_states)
        if number == graph.num_states:
            graph.edges.append([])
            graph.path_to.append(path)
            graph.num_requests.append(len(state.requests))
        return number

    first = replace(engine.snapshot(), choices=engine.profile.choices)
    queue = deque([(enter(first, ()), engine, first)])
    while queue:
        number, engine, state = queue.popleft()
        for turn in turns(state, load):
            twin = deepcopy(engine)
            path = (*graph.path_to[number], turn)
            try:
                after = take_turn(twin, state, turn, load, judged=judged)[0]
            except RuleViolation as violation:
                graph.violation, graph.path = violation, path
                return graph
            known = graph.num_states
            target = enter(after, path)
            order = {request_id: place for place, request_id in enumerate(after.requests)}
            places = {place: order[i] for place, i in enumerate(state.requests) if i in order}
            graph.edges[number].append(Edge(turn, target, places))
            if target == known:
                queue.append((target, twin, after))
                if on_progress is not None and target % 1000 == 0:
                    on_progress(target)
    return graph


def turns(s: State, load: Load) -> Iterator[Turn]:
    """What may happen next."""
    if s.requests:
        yield None
    if len(s.requests) < load.max_requests:
        yield from range(len(load.kinds))


def take_turn(
    engine: Engine, state: State, turn: Turn, load: Load, *, judged: bool = False
) -> tuple[State, StepReport | None]:
    """Where a turn leads, and what the engine reports if it was a step. Raises ``RuleViolation`` if it is judged."""
    sampled: list[Sample] = []

    def next_token(seq: SeqId, tokens: Prefix) -> Token:
        sampled.append(Sample(seq, tokens, 0))
        return 0

    report, events = None, list[Event]()
    if turn is not None:
        name = next(i for i in range(load.max_requests) if i not in state.requests)
        request = load.kinds[turn].request(name)
        engine.add(request)
        events = [Add(request)]
    else:
        report = engine.step(next_token)
    shown = engine.snapshot()
    if not judged:
        return shown, report
    if report is not None:
        events = events_of_step(state, report, shown, sampled)
    return _judged(state, events, shown, engine.profile.name), report


def _judged(state: State, events: Iterable[Event], shown: State, engine: str) -> State:
    for event in events:
        after = step(state, event)
        check_rules(state, event, after, engine=engine)
        state = after
    shown = observe(state, shown)
    check_rules(state, Observe(), shown, engine=engine)
    return shown


def schedule_key(s: State) -> Key:
    """What decides how the engine goes on: the two lines, and of each request its lengths and where its tokens are.

    Without a prefix cache neither the names of blocks nor their order matters, and no count of the past does.
    """
    order = {request_id: place for place, request_id in enumerate(s.requests)}
    requests = tuple(
        (
            request.priority,
            request.max_tokens,
            tuple(
                (
                    seq.num_prompt_tokens,
                    seq.num_tokens,
                    seq.num_computed_tokens,
                    seq.num_dropped_blocks,
                    len(s.block_tables.get(i, ())),
                    len(s.host_tables.get(i, ())),
                )
                for i, seq in s.seqs.items()
                if seq.request_id == request_id
            ),
        )
        for request_id, request in s.requests.items()
    )
    return requests, tuple(order[i] for i in s.waiting), tuple(order[i] for i in s.running)


# Lassos


def find_lasso(graph: Schedules) -> Lasso | None:
    """A shortest stem to a cycle in which some request stays for ever; None if every request ends, however the
    others arrive, as long as the engine makes steps."""
    follow = {
        (number, place): [((edge.target, edge.places[place]), edge.turn) for edge in edges if place in edge.places]
        for number, edges in enumerate(graph.edges)
        for place in range(graph.num_requests[number])
    }
    for number, place in sorted(_without_dead_ends(follow), key=lambda at: (len(graph.path_to[at[0]]), at)):
        cycle = _shortest_cycle(follow, (number, place))
        if cycle:
            return Lasso(graph.path_to[number], cycle, place)
    return None


_Follow: TypeAlias = Mapping[Place, Sequence[tuple[Place, Turn]]]


def _without_dead_ends(follow: _Follow) -> set[Place]:
    """The places that are on a cycle or between two: what is left when ends are taken away, from both sides."""
    back: dict[Place, list[Place]] = {at: [] for at in follow}
    for at, nexts in follow.items():
        for target, _ in nexts:
            back[target].append(at)
    forward = {at: [target for target, _ in nexts] for at, nexts in follow.items()}
    left = set(follow)
    for ahead, behind in ((forward, back), (back, forward)):
        count = {at: sum(target in left for target in ahead[at]) for at in left}
        ends = [at for at in left if not count[at]]
        while ends:
            end = ends.pop()
            left.discard(end)
            for at in behind[end]:
                if at in left:
                    count[at] -= 1
                    if not count[at]:
                        ends.append(at)
    return left


def _shortest_cycle(follow: _Follow, start: Place) -> tuple[Turn, ...]:
    """The turns of a shortest way back to the start; none if there is none."""
    queue: deque[tuple[Place, tuple[Turn, ...]]] = deque([(start, ())])
    seen: set[Place] = set()
    while queue:
        at, path = queue.popleft()
        for target, turn in follow[at]:
            if target == start:
                return (*path, turn)
            if target not in seen:
                seen.add(target)
                queue.append((target, (*path, turn)))
    return ()


def tell(load: Load, make: EngineFactory, lasso: Lasso) -> str:
    """The lasso as a story: who arrives, and after each step who runs, who waits, who was preempted and who has ended.
    Requests are called A, B, C in the order of arrival."""
    engine = make(load.config)
    state, names, lines, num_arrived = engine.snapshot(), dict[RequestId, str](), list[str](), 0
    for number, turn in enumerate((*lasso.stem, *lasso.cycle)):
        if number == len(lasso.stem):
            hero = names[list(state.requests)[lasso.place]]
            lines.append(f"and from here on the same for ever, while {hero} never ends:")
        after, report = take_turn(engine, state, turn, load)
        if turn is not None:
            newest = list(after.requests)[-1]
            names[newest] = _letters(num_arrived)
            num_arrived += 1
            kind = load.kinds[turn]
            lines.append(
                f"  {names[newest]} arrives: a prompt of {kind.num_prompt_tokens}, at most {kind.max_tokens} more"
            )
        elif report is not None:
            lines.append(f"  step: {_queues(after, names)}{_happened(state, report, names)}")
        state = after
    return "\n".join(lines)


def _letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _queues(s: State, names: Mapping[RequestId, str]) -> str:
    lengths = {seq.request_id: f"{seq.num_computed_tokens}/{seq.num_tokens}" for seq in s.seqs.values()}
    running = ", ".join(f"{names[i]} {lengths[i]}" for i in s.running) or "nobody"
    waiting = ", ".join(names[i] for i in s.waiting) or "nobody"
    return f"running {running}; waiting {waiting}"


def _happened(before: State, report: StepReport, names: Mapping[RequestId, str]) -> str:
    request_of = {i: seq.request_id for i, seq in before.seqs.items()}
    words = [f"{names[event.request_id]} was preempted" for event in report.preempted]
    words += [f"{names[request_of[event.seq]]} has ended" for event in report.finished]
    return f" ({', '.join(words)})" if words else ""
