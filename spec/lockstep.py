"""A pool beside the specification, over every state of a scope: the same calls, the same answers, the same states."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spec.canonical import Key, canonical
from spec.engine import Admission, InvalidRequest, Pool, PoolFactory
from spec.explore import StepJudge
from spec.model_pool import Answer, ModelPool
from spec.replay import observe, step
from spec.rules import RULES, Rule, RuleViolation, broken_rules, broken_state_rules
from spec.scope import Move, Scope, moves, rollbacks
from spec.vocabulary import Event, Observe, State, initial_state

NOBODY = 99
"""An id that no sequence of a scope has, and no step."""


@dataclass(frozen=True)
class Fault:
    """Where a pool went wrong: after which calls, in which call, and how. ``rule`` is the one that it broke, if the
    rules say so; otherwise it did what is allowed, and not what the specification does."""

    path: tuple[Move, ...]
    move: Move
    sentence: str
    rule: str | None = None


@dataclass
class Lockstep:
    """What a walk found: the states up to renaming, the calls made, those refused, those that were the caller's
    mistake, and the first fault."""

    num_states: int = 0
    num_operations: int = 0
    num_refusals: int = 0
    num_mistakes: int = 0
    depth: int = 0
    fault: Fault | None = None


class Differs(Exception):
    """A call did something else than the specification does; ``rule`` is the id of a rule that says so, ``violation`` how.

    ``later`` is that call where it is not the one that was just made, but one more.
    """

    def __init__(
        self,
        sentence: str,
        rule: str | None = None,
        violation: RuleViolation | None = None,
        later: Move | None = None,
    ) -> None:
        super().__init__(sentence)
        self.rule = rule
        self.violation = violation
        self.later = later


def _fault(path: tuple[Move, ...], move: Move, difference: Differs) -> Fault:
    """Where a difference came up."""
    if difference.later is not None:
        path, move = (*path, move), difference.later
    return Fault(path, move, str(difference), difference.rule)


def _broken(rule: Rule, before: State, event: Event, after: State) -> Differs:
    violation = RuleViolation(rule, before, event, after)
    return Differs(str(violation), rule.id, violation)


@dataclass(frozen=True)
class _Place:
    """A state, a way to it, and a pool that is in it, if pools can be copied."""

    state: State
    path: tuple[Move, ...]
    pool: Pool | None

    def arrive(self, make: PoolFactory) -> Pool:
        """A pool in this state that the next call may change."""
        if self.pool is not None:
            return self.pool.clone()  # type: ignore[attr-defined,no-any-return]  # not part of the protocol
        pool = make(self.state.config)
        for move in self.path:
            move.call(pool)
        if observe(self.state, pool.snapshot()) != self.state:
            raise Differs("the same calls on a new pool lead elsewhere: a pool takes no chances")
        return pool


def walk(scope: Scope, make: PoolFactory, *, on_progress: Callable[[int], None] | None = None) -> Lockstep:
    """Drive a pool through every state of the scope, with every call that makes sense there and with some that do not;
    stop at the first fault. A pool without ``clone()`` replays the shortest path before each call."""
    found, judge, pool = Lockstep(num_states=1), StepJudge(), make(scope.config)
    keeps = hasattr(pool, "clone")
    first = observe(initial_state(scope.config, pool.profile.choices), pool.snapshot())
    queue = deque([_Place(first, (), pool if keeps else None)])
    seen: set[Key] = {canonical(first)}
    while queue:
        place = queue.popleft()
        found.depth = len(place.path)
        try:
            pool = place.arrive(make)
        except Differs as difference:
            last = place.path[-1] if place.path else Move("snapshot")
            found.fault = Fault(place.path[:-1], last, str(difference), difference.rule)
            return found
        for move in mistakes(place.state, scope):
            found.num_operations += 1
            found.num_mistakes += 1
            try:
                turn_down(move, pool, place.state, judge)
            except Differs as difference:
                found.fault = _fault(place.path, move, difference)
                return found
        for move in moves(place.state, scope):
            found.num_operations += 1
            try:
                pool = place.arrive(make)
                after = call(move, pool, place.state, judge)
                if after is None:
                    found.num_refusals += 1
                    continue
                key = canonical(after)
                if key in seen:
                    found.num_operations += _second_look(after, pool, scope, judge, found.num_operations)
                    continue
                judge_state(after)
            except Differs as difference:
                found.fault = _fault(place.path, move, difference)
                return found
            seen.add(key)
            found.num_states += 1
            queue.append(_Place(after, (*place.path, move), pool if keeps else None))
            if on_progress is not None and found.num_states % 1000 == 0:
                on_progress(found.num_states)
    return found


def mistakes(s: State, scope: Scope) -> Iterator[Move]:
    """Calls that are the caller's mistake in this state."""
    live, running = next(iter(s.seqs), None), next(iter(s.block_tables), None)
    yield Move("allocate", NOBODY)
    yield Move("append", NOBODY, (0,))
    if "fork" in scope.operations:
        yield Move("fork", NOBODY, child=NOBODY)
    if live is not None:
        yield Move("allocate", live, (0,))
    if running is not None:
        yield Move("append", running)
        if "fork" in scope.operations:
            yield Move("fork", running, child=running)
    for name in sorted(scope.operations & {"release", "swap_out", "swap_in", "publish"}):
        yield Move(name, NOBODY)
    for swapped in list(s.host_tables)[:1]:
        yield Move("append", swapped, (0,))
        yield Move("swap_out", swapped)
    if "rollback" in scope.operations:
        yield Move("rollback", NOBODY, number=1)
        if running is not None:
            yield Move("rollback", running, number=0)
            yield Move("rollback", running, number=s.seqs[running].num_tokens)
        slid = next((i for i in s.block_tables if s.seqs[i].num_dropped_blocks and rollbacks(s, i).start > 1), None)
        if slid is not None:  # COW-8: the window has let go of what the next token would see
            yield Move("rollback", slid, number=rollbacks(s, slid).start - 1)
    if scope.max_flights:
        yield Move("complete", number=NOBODY)
        for step_id in list(s.flights)[:1]:
            yield Move("submit", NOBODY if running is None else running, number=step_id)


def turn_down(move: Move, pool: Pool, state: State, judge: StepJudge) -> None:
    """The call is invalid, and changes nothing. If it was answered with events, the first rule that they break says why
    not."""
    before = pool.snapshot()
    try:
        answer: object = move.call(pool)
    except InvalidRequest:
        if (shown := pool.snapshot()) != before:
            raise _broken(RULES["API-1"], state, move.refusal, observe(state, shown)) from None
        return
    except Exception as error:  # noqa: BLE001  whatever a broken pool does
        raise Differs(f"an invalid call raised {error!r}") from None
    if isinstance(answer, tuple):
        judge_state(_follow(state, answer, pool.snapshot(), judge))
    raise Differs(f"an invalid call was answered with {answer!r}")


def call(move: Move, pool: Pool, state: State, judge: StepJudge) -> State | None:
    """Where the call leads pool and specification alike; None if both refuse it."""
    model = ModelPool(state)
    expected = move.call(model)
    try:
        answer = move.call(pool)
        shown = pool.snapshot()
    except Exception as error:  # noqa: BLE001  whatever a broken pool does
        raise Differs(f"the call raised {error!r}") from None
    if isinstance(answer, Admission) or isinstance(expected, Admission):
        if not isinstance(answer, Admission):  # what is done without room breaks a rule, most often
            judge_state(_follow(state, answer, shown, judge))
        _same_refusal(answer, expected)
        if (shown := observe(state, shown)) != state:
            raise _broken(RULES["API-1"], state, move.refusal, shown)
        return None
    after = _follow(state, answer, shown, judge)
    if pool.profile.choices == ModelPool.profile.choices and canonical(after) != canonical(model.state):
        judge_state(after)
        raise Differs(f"the events are allowed, and are not those of the specification: {answer!r}, not {expected!r}")
    return after


def _second_look(state: State, pool: Pool, scope: Scope, judge: StepJudge, number: int) -> int:
    """One more call in a state that was there before, each time another one; how many calls that were.

    A pool may keep what it does not show: two ways to one state need not leave it the same.
    """
    offered = list(moves(state, scope))
    if not offered:
        return 0
    move = offered[number % len(offered)]
    try:
        call(move, pool, state, judge)
    except Differs as difference:
        raise Differs(str(difference), difference.rule, difference.violation, later=move) from None
    return 1


def _same_refusal(answer: Answer, expected: Answer) -> None:
    if answer is not expected:
        said, meant = (each.name if isinstance(each, Admission) else "done" for each in (answer, expected))
        raise Differs(f"the answer is {said}, and must be {meant}")


def _follow(state: State, events: tuple[Event, ...], shown: State, judge: StepJudge) -> State:
    """Where the events lead, which is also what the pool shows."""
    for event in events:
        after = step(state, event)
        rule = judge.broken(state, event, after)
        if rule is not None:
            raise _broken(rule, state, event, after)
        state = after
    shown = observe(state, shown)
    if judge.broken(state, Observe(), shown) is not None:
        rule = broken_rules(state, Observe(), shown)[0]
        raise _broken(rule, state, Observe(), shown)
    return shown


def judge_state(s: State) -> None:
    """Raises ``Differs`` for the first state rule that does not hold."""
    for rule in broken_state_rules(s):
        raise _broken(rule, s, Observe(), s)
