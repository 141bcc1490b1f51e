"""Every reachable state of a small scope: the search, what it found, and the shortest way there."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spec.canonical import Key, Names, canonical
from spec.model_pool import ModelPool, Step
from spec.picture import Map, mark_changes, memory_map
from spec.rules import Rule, RuleViolation, broken_state_rules, step_rules_about
from spec.scope import Move, Scope, moves
from spec.vocabulary import Config, Event, State, initial_state

__all__ = ["Exploration", "Move", "Names", "Scope", "StepJudge", "canonical", "explore", "story"]


@dataclass
class Exploration:
    """What a search found: how many states, edges and refused calls there are, the most calls that a state is away
    from an empty pool, and the shortest way to what it was looking for or to what breaks a rule."""

    num_states: int = 0
    num_edges: int = 0
    num_refusals: int = 0
    num_events: int = 0
    depth: int = 0
    violation: RuleViolation | None = None
    path: tuple[Move, ...] = ()
    state: State | None = None

    @property
    def broken(self) -> tuple[Rule, ...]:
        """The rule that does not hold, if there is one."""
        return (self.violation.rule,) if self.violation is not None else ()


class StepJudge:
    """The step rules, sorted by the kind of event that they are about."""

    def __init__(self) -> None:
        self.about: dict[type, list[Rule]] = {}

    def broken(self, before: State, event: Event, after: State) -> Rule | None:
        """The first rule that the step breaks."""
        kind = type(event)
        rules = self.about.get(kind)
        if rules is None:
            rules = self.about[kind] = step_rules_about(kind)
        for rule in rules:
            if not rule.holds(before, event, after):
                return rule
        return None


def explore(
    scope: Scope,
    *,
    reach: Callable[[State], bool] | None = None,
    on_edge: Callable[[State, Event, State], object] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Exploration:
    """Visit every reachable state of the scope, shortest paths first; stop at the first broken rule, or where
    ``reach`` says so."""
    first, found, judge = initial_state(scope.config, ModelPool.profile.choices), Exploration(num_states=1), StepJudge()
    parents: dict[Key, tuple[Key | None, Move | None]] = {canonical(first): (None, None)}
    queue = deque([(first, canonical(first), 0)])
    if reach is not None and reach(first):
        found.state = first
        return found
    while queue:
        state, key, found.depth = queue.popleft()
        for move in moves(state, scope):
            pool = ModelPool(state)
            if not isinstance(move.call(pool), tuple):
                found.num_refusals += 1
                continue
            found.num_edges += 1
            found.num_events += len(pool.steps)
            after = pool.state
            new_key = canonical(after)
            fresh = new_key not in parents
            broken = _broken_step(judge, pool.steps) or (_broken_state(pool.steps) if fresh else None)
            if fresh:
                parents[new_key] = (key, move)
                found.num_states += 1
            if broken is not None or (fresh and reach is not None and reach(after)):
                found.path = (*_path(parents, key), move)
                found.state = after
                found.violation = broken
                return found
            if on_edge is not None:
                for step in pool.steps:
                    on_edge(*step)
            if fresh:
                queue.append((after, new_key, found.depth + 1))
                if on_progress is not None and found.num_states % 1000 == 0:
                    on_progress(found.num_states)
    return found


def _broken_step(judge: StepJudge, steps: Sequence[Step]) -> RuleViolation | None:
    for before, event, after in steps:
        rule = judge.broken(before, event, after)
        if rule is not None:
            return RuleViolation(rule, before, event, after)
    return None


def _broken_state(steps: Sequence[Step]) -> RuleViolation | None:
    """What is wrong with where a call led, whatever it did on the way."""
    if not steps:
        return None
    before, event, after = steps[-1]
    return next((RuleViolation(rule, before, event, after) for rule in broken_state_rules(after)), None)


def _path(parents: Mapping[Key, tuple[Key | None, Move | None]], key: Key) -> tuple[Move, ...]:
    path: list[Move] = []
    step_back: Key | None = key
    while step_back is not None:
        step_back, move = parents[step_back]
        if move is not None:
            path.append(move)
    return tuple(reversed(path))


def story(config: Config, path: Sequence[Move]) -> list[Map]:
    """A memory map after each call, from an empty pool on; what a call changed is marked."""
    pool = ModelPool(initial_state(config))
    maps = [memory_map(pool.state, "an empty pool")]
    for move in path:
        move.call(pool)
        maps.append(mark_changes(maps[-1], memory_map(pool.state, str(move))))
    return maps
