"""Pools, judged call by call beside the specification, and the state machine that drives them."""

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from spec.conformance.guard import GuardedPool
from spec.conformance.story import Differs
from spec.engine import Capability, Profile
from spec.explore import StepJudge
from spec.lockstep import NOBODY, call, judge_state, mistakes, turn_down
from spec.lockstep import Differs as CallDiffers
from spec.replay import observe
from spec.scope import CACHE, FLIGHTS, PLAIN, ROLLBACK, SWAP, Move, Scope, rollbacks
from spec.vocabulary import Config, Prefix, SeqId, State, initial_state

MAX_SEQS = 4
"""States are compared up to the order of their sequences: all orders are tried."""


class JudgedPool:
    """A pool whose every call is compared with what the specification does: the answer, the events, what it shows."""

    def __init__(self, pool: GuardedPool, config: Config) -> None:
        self.pool = pool
        self.config = config
        self.state = observe(initial_state(config, pool.profile.choices), pool.snapshot())
        self._judge = StepJudge()

    def call(self, move: Move) -> State | None:
        """Where the call leads; None where it is refused, rightly. Raises ``ValueError`` for the caller's mistakes."""
        if not makes_sense(self.state, move):
            raise ValueError(f"{move} is a mistake in this state")
        try:
            after = call(move, self.pool, self.state, self._judge)
            if after is not None:
                judge_state(after)
                self.state = after
            return after
        except CallDiffers as difference:
            raise self._why(difference) from difference.__cause__

    def mistake(self, move: Move) -> None:
        """The call is its caller's mistake: it is refused as invalid, and changes nothing."""
        if makes_sense(self.state, move):
            raise ValueError(f"{move} is no mistake in this state")
        try:
            turn_down(move, self.pool, self.state, self._judge)
        except CallDiffers as difference:
            raise self._why(difference) from difference.__cause__

    def _why(self, difference: CallDiffers) -> Exception:
        return self.pool.guard.fault or difference.violation or Differs(str(difference), difference.rule)


def makes_sense(s: State, move: Move) -> bool:
    """Whether a caller may make this call in this state."""
    match move.operation:
        case "allocate":
            return move.seq not in s.seqs and bool(move.tokens)
        case "append":
            return move.seq in s.block_tables and bool(move.tokens)
        case "fork":
            return move.seq in s.block_tables and move.child not in s.seqs
        case "release":
            return move.seq in s.seqs
        case "swap_in":
            return move.seq in s.host_tables
        case "rollback":
            return move.seq in s.block_tables and move.number in rollbacks(s, move.seq)
        case "submit":
            return move.seq in s.block_tables and move.number not in s.flights
        case "complete":
            return move.number in s.flights
        case "reset":
            return True
    return move.seq in s.block_tables


def pool_configs(profile: Profile) -> st.SearchStrategy[Config]:
    """Pools of 2 to 8 blocks of 1 to 4 tokens. A window and a prefix cache are not combined."""
    plain = st.builds(
        Config,
        num_blocks=st.integers(2, 8).map(lambda n: n + profile.num_reserved_blocks),
        block_size=st.integers(1, 4),
        num_host_blocks=st.integers(0, 4) if profile.can(Capability.SWAP) else st.just(0),
    )
    kinds = [plain]
    if profile.can(Capability.PREFIX_CACHE):
        kinds.append(plain.map(lambda config: replace(config, prefix_cache=True)))
    if profile.can(Capability.WINDOW):
        kinds.append(st.builds(lambda config, window: replace(config, window=window), plain, st.integers(1, 5)))
    return st.one_of(kinds)


def operations(profile: Profile) -> frozenset[str]:
    """The calls that a pool of this profile knows."""
    known = PLAIN if profile.can(Capability.FORK, Capability.COPY_ON_WRITE) else PLAIN - {"fork"}
    for capability, more in {
        Capability.SWAP: SWAP,
        Capability.PREFIX_CACHE: CACHE,
        Capability.ROLLBACK: ROLLBACK,
        Capability.OVERLAP: FLIGHTS,
    }.items():
        known |= more if profile.can(capability) else frozenset()
    return known


class PoolMachine(RuleBasedStateMachine):
    """One pool, driven by a caller who knows what the profile declares."""

    profile: Profile

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.config = data.draw(pool_configs(self.profile), label="config")
        self.known = operations(self.profile) - (frozenset() if self.config.prefix_cache else CACHE)
        self.judged = self.make(self.config)

    def make(self, config: Config) -> JudgedPool:
        raise NotImplementedError

    def tokens(self, data: st.DataObject, most: int) -> Prefix:
        return tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=max(1, most)), label="tokens"))

    def fresh(self) -> SeqId:
        """The first id that is not in use: names come again."""
        return next(i for i in range(NOBODY) if i not in self.judged.state.seqs)

    def running(self, data: st.DataObject) -> SeqId:
        return data.draw(st.sampled_from(sorted(self.judged.state.block_tables)), label="sequence")

    @precondition(lambda self: len(self.judged.state.seqs) < MAX_SEQS)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        self.judged.call(Move("allocate", self.fresh(), self.tokens(data, 3 * self.config.block_size)))

    @precondition(lambda self: self.judged.state.block_tables)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self.judged.call(Move("append", self.running(data), self.tokens(data, self.config.block_size + 1)))

    @precondition(lambda self: 0 < len(self.judged.state.block_tables) <= len(self.judged.state.seqs) < MAX_SEQS)
    @precondition(lambda self: "fork" in self.known)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.judged.call(Move("fork", self.running(data), child=self.fresh()))

    @precondition(lambda self: self.judged.state.seqs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.judged.call(Move("release", data.draw(st.sampled_from(sorted(self.judged.state.seqs)), label="sequence")))

    @precondition(lambda self: "swap_out" in self.known and self.judged.state.block_tables)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        self.judged.call(Move("swap_out", self.running(data)))

    @precondition(lambda self: self.judged.state.host_tables)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        swapped = data.draw(st.sampled_from(sorted(self.judged.state.host_tables)), label="sequence")
        self.judged.call(Move("swap_in", swapped))

    @precondition(lambda self: "publish" in self.known and self.judged.state.block_tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.judged.call(Move("publish", self.running(data)))

    @precondition(lambda self: "reset" in self.known and self.judged.state.cached)
    @rule(chance=st.integers(0, 5))
    def reset(self, chance: int) -> None:
        """Now and then: an empty cache has no bugs."""
        if chance == 0:
            self.judged.call(Move("reset"))

    @precondition(lambda self: "rollback" in self.known and self.judged.state.block_tables)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        seq = self.running(data)
        if lengths := rollbacks(self.judged.state, seq):
            self.judged.call(Move("rollback", seq, number=data.draw(st.sampled_from(lengths), label="length")))

    @precondition(lambda self: "submit" in self.known and self.judged.state.block_tables)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        step_id = max(self.judged.state.flights, default=-1) + 1
        self.judged.call(Move("submit", self.running(data), number=step_id))

    @precondition(lambda self: self.judged.state.flights)
    @rule()
    def complete(self) -> None:
        self.judged.call(Move("complete", number=min(self.judged.state.flights)))

    @rule(data=st.data())
    def mistake(self, data: st.DataObject) -> None:
        scope = Scope(self.config, max_flights=2 if "submit" in self.known else 0, operations=self.known)
        self.judged.mistake(data.draw(st.sampled_from(list(mistakes(self.judged.state, scope))), label="mistake"))
