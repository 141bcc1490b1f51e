"""A hunt: stories by the hundred until one ends badly; then the shortest one that ends in the same way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from spec.conformance.door import all_end
from spec.conformance.fixed import FixedStory
from spec.conformance.guard import CALL_LIMIT_S, AdapterFault, GuardedPool
from spec.conformance.judge import JudgedEngine
from spec.conformance.machine import EngineMachine
from spec.conformance.pools import JudgedPool, PoolMachine
from spec.conformance.shrink import Calls, shrink
from spec.conformance.story import Call, Differs, Failed, Recorder, Setting
from spec.conformance.target import Kind, Target
from spec.engine import Capability, InvalidRequest, PoolFactory, Profile
from spec.lockstep import mistakes, walk
from spec.rules import RuleViolation
from spec.scope import Scope
from spec.vocabulary import AdmissionRule, Config

NUM_STEPS = 30
FEW_REPLAYS = 300
"""A fixed story is short, and there are many that may fail."""
NO_END = "assert all_end(judged)"
WRONG: Mapping[str, Callable[[object], bool]] = {
    "assert not CALL": bool,
    "assert CALL is None": lambda answer: answer is not None,
    "assert CALL is not None": lambda answer: answer is None,
}
"""What must hold of the answer of the last call, as Python, and whether it does not."""
FAILURES = (RuleViolation, AdapterFault, Differs)


@dataclass
class Hunt:
    """One test of a state machine. ``judge`` makes what is judged, ``check_time`` raises when the time is over."""

    target: Target
    setting: Setting
    judge: Callable[[Config, float], object]
    check_time: Callable[[Callable[[], str]], None]
    num_stories: int = 0
    config: Config | None = None
    recorder: Recorder | None = None
    failed: Failed | None = None
    limit_s: float = CALL_LIMIT_S
    cut: Exception | None = None

    def begin(self, config: Config) -> Recorder:
        """A story begins."""
        if self.failed is None:
            try:
                self.check_time(lambda: f"{self.num_stories} stories")
            except Exception as cut:
                self.cut = cut
                raise
            self.num_stories += 1
        self.config, self.recorder = config, None
        try:
            self.recorder = Recorder(self.judge(config, self.limit_s), self.note)
        except AdapterFault as fault:
            self.note(fault)
            raise
        return self.recorder

    def note(self, why: Exception) -> None:
        """A story ended badly: the first one is the one that counts."""
        if self.failed is None and self.config is not None:
            story = tuple(self.recorder.story) if self.recorder else ()
            self.failed = Failed(self.target.name, why, self.config, story, self.setting)

    def run(self, machine: type[RuleBasedStateMachine], max_examples: int) -> None:
        """Raises ``Failed``, or ``Incomplete`` when the time is over."""
        tier = settings(
            max_examples=max_examples,
            stateful_step_count=NUM_STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],  # what it finds is made shorter call by call, not draw by draw
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        try:
            run_state_machine_as_test(machine, settings=tier)
        except AssertionError as error:
            self.note(Differs(str(error), check=_check(str(error))))
        except Flaky as error:
            if self.cut is not None:  # a story that was told before, and is cut off now
                raise self.cut from None
            name = self.target.call.__name__
            self.note(AdapterFault(name, f"the same calls lead elsewhere when they are made again: {error}"))
        except FAILURES:
            pass  # it has been noted
        if self.failed is not None:
            failed = shrink(self.failed, self.replay)
            raise failed from failed.why

    def tell(self, story: FixedStory, profile: Profile, most_replays: int = FEW_REPLAYS) -> None:
        """Tell a fixed story to its end, which for an engine is when everybody has been served. Raises ``Failed``, or
        ``Incomplete`` when the time is over."""
        try:
            recorder = self.begin(story.limits(profile))
            for call in story.calls:
                recorder.tell(call)
            if self.target.kind is Kind.ENGINE and not all_end(cast(JudgedEngine, recorder)):
                self.note(Differs("these requests never end, or leave something behind", check=NO_END))
        except InvalidRequest as refusal:
            method = self.recorder.story[-1].call.method if self.recorder else self.target.call.__name__
            self.note(AdapterFault(method, f"raised {refusal!r}, and has nothing to refuse"))
        except FAILURES:
            pass  # it has been noted
        if self.failed is not None:
            failed = shrink(self.failed, self.replay, most_replays)
            raise failed from failed.why

    def replay(self, config: Config, calls: Calls) -> Failed | None:
        """Tell a story again: how it fails, or None."""
        if self.failed is None:
            return None
        why = self.failed.why
        limit_s = 1.0 if "did not return" in str(why) else self.limit_s
        again = replace(self, failed=None, check_time=lambda done: None, limit_s=limit_s)
        try:
            recorder = again.begin(config)
            answers = [recorder.tell(call) for call in calls]
            if isinstance(why, Differs):
                is_same = why.check in WRONG and calls[-1] == self.failed.story[-1].call
                is_wrong = is_same and WRONG[why.check](answers[-1])
                if is_wrong or (why.check == NO_END and not all_end(cast(JudgedEngine, recorder.judged))):
                    again.note(why)
        except FAILURES:
            pass
        except ValueError:  # without a call before it, this one makes no sense
            return None
        return again.failed


def _check(sentence: str) -> str:
    """What the machine found wrong, as Python that must hold."""
    if "never end" in sentence or "have ended" in sentence:
        return NO_END
    if "a step began" in sentence:
        return "assert CALL is None"
    return "assert CALL is not None" if "did not begin" in sentence else "assert not CALL"


def hunt_engine(hunt: Hunt, profile: Profile, max_examples: int, name: str) -> None:
    """Drive the engines of the target with a caller who uses what this profile declares. Raises ``Failed``."""

    class Machine(EngineMachine):
        def make(self, config: Config) -> JudgedEngine:
            return cast(JudgedEngine, hunt.begin(config))

    hunt.run(_named(Machine, name, profile), max_examples)


def hunt_pool(hunt: Hunt, profile: Profile, max_examples: int, name: str) -> None:
    """The same of a pool."""

    class Machine(PoolMachine):
        def make(self, config: Config) -> JudgedPool:
            return cast(JudgedPool, hunt.begin(config))

    hunt.run(_named(Machine, name, profile), max_examples)


def _named(machine: type[RuleBasedStateMachine], name: str, profile: Profile) -> type[RuleBasedStateMachine]:
    """The name is that of the test: it decides which stories are drawn."""
    attributes: dict[str, Any] = {"profile": profile}  # Any: what a class holds
    return type(name, (machine,), attributes)


def walk_pool(hunt: Hunt, make: PoolFactory, scope: Scope) -> None:
    """Drive pools through every state of a scope. Raises ``Failed`` with the shortest story that there is."""
    made: list[GuardedPool] = []

    def guarded(config: Config) -> GuardedPool:
        hunt.check_time(lambda: f"{hunt.num_stories} calls in a row")
        hunt.num_stories += 1
        made[:] = [GuardedPool(make, config)]
        return made[0]

    found = walk(scope, guarded)
    if found.fault is None:
        return
    calls = [Call("call", (move,)) for move in found.fault.path]
    recorder = hunt.begin(scope.config)
    try:
        for call in calls:
            recorder.tell(call)
        state = cast(JudgedPool, recorder.judged).state
        is_mistake = found.fault.move in list(mistakes(state, scope))
        recorder.tell(Call("mistake" if is_mistake else "call", (found.fault.move,)))
    except (*FAILURES, ValueError):
        pass  # noted, or a pool that is not the same twice
    if hunt.failed is None:
        hunt.note(made[0].guard.fault or Differs(found.fault.sentence, found.fault.rule))
    if hunt.failed is not None:
        raise hunt.failed from hunt.failed.why


def narrowed(profile: Profile, capabilities: frozenset[Capability], preempts: bool | None) -> Profile:
    """The profile of a caller who knows these capabilities only, and who wants preemption, wants none, or whatever."""
    wanted = {AdmissionRule.NO_EVICT: preempts is not True}
    rules = tuple(rule for rule in profile.admission_rules if wanted.get(rule, preempts is not False))
    return replace(
        profile, capabilities=profile.capabilities & capabilities, admission_rules=rules or profile.admission_rules
    )
