"""The state machine: a caller who adds, steps, forks and aborts in any order, while every call is judged."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from spec.conformance.judge import JudgedEngine
from spec.conformance.lockstep import LockstepEngine, common
from spec.engine import Capability, EngineFactory, Profile
from spec.sharing import seq_ids_in_use
from spec.vocabulary import Config, Policy, Prefix, Recovery, Request, RequestId, SeqId, Token, all_blocks

STOP: Token = 2
"""The token that ends a sequence. The others are 0 and 1: few, so that prefixes repeat."""


def next_token(seq: SeqId, tokens: Prefix) -> Token:
    """What the sequence is given next: a function of its name and its tokens, so that any schedule gives the same."""
    number = hashlib.sha256(repr((seq, tokens)).encode()).digest()[0]
    return STOP if number % 16 == 0 else number // 16 % 2


def configs(profile: Profile) -> st.SearchStrategy[Config]:
    """Tiny engines, which is where the bugs are: 2 to 8 blocks of 1 to 4 tokens."""
    can = profile.can
    config = st.builds(
        Config,
        num_blocks=st.integers(2, 8).map(lambda n: n + profile.num_reserved_blocks),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 8) if can(Capability.CHUNKED_PREFILL) else st.just(64),
        max_model_len=st.integers(8, 32),
        watermark_blocks=st.integers(0, 1),
        num_host_blocks=st.integers(0, 3) if can(Capability.SWAP) else st.just(0),
        recovery=st.sampled_from(Recovery) if can(Capability.SWAP) else st.just(Recovery.RECOMPUTE),
        policy=st.sampled_from(policies(profile)),
        admission_rule=st.sampled_from(profile.admission_rules),
        max_num_partial_prefills=st.sampled_from((1, 1, 2, 3)) if can(Capability.PARTIAL_PREFILLS) else st.just(1),
    )
    memory: list[Mapping[str, object]] = [{}]
    swap: Mapping[str, object] = {"recovery": Recovery.SWAP, "num_host_blocks": 6, "watermark_blocks": 0}
    memory += [swap, {**swap, "admission_rule": profile.admission_rules[0]}] if can(Capability.SWAP) else []
    memory += [{"prefix_cache": True}] * 2 if can(Capability.PREFIX_CACHE) else []
    memory += [{"window": window} for window in (1, 2, 3, 5)] if can(Capability.WINDOW) else []
    memory += [{"window": 4, "prefix_cache": True}] if can(Capability.WINDOW, Capability.PREFIX_CACHE) else []
    return st.builds(_with, config, st.sampled_from(memory))


def policies(profile: Profile) -> list[Policy]:
    """The orders of service that the engine has. Static batches are the dullest."""
    by_priority = [Policy.PRIORITY] if profile.can(Capability.PRIORITY) else []
    static = [Policy.STATIC] if profile.can(Capability.STATIC_BATCHES) else []
    return [Policy.FCFS, *by_priority] * 2 + static


def _with(config: Config, more: Mapping[str, Any]) -> Config:  # Any: the values of any fields
    return replace(config, **more)


class EngineMachine(RuleBasedStateMachine):
    """One engine, driven by a caller. ``factory`` makes the engine that is judged."""

    factory: EngineFactory
    profile: Profile

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.config = data.draw(configs(self.profile), label="config")
        self.judged = self.make(self.config)
        self.num_requests = 0
        self.num_seqs = 0

    def make(self, config: Config) -> JudgedEngine | LockstepEngine:
        return JudgedEngine(type(self).factory(config), config)

    def fresh_seqs(self, count: int) -> tuple[SeqId, ...]:
        self.num_seqs += count
        return tuple(range(self.num_seqs - count, self.num_seqs))

    def forkable(self) -> list[SeqId]:
        state = self.judged.state
        running = [i for i, seq in state.seqs.items() if seq.request_id in state.running]
        return [i for i in running if state.seqs[i].num_output_tokens > 0 and not state.seqs[i].num_scheduled_tokens]

    @rule(data=st.data(), count=st.integers(1, 3))
    def add(self, data: st.DataObject, count: int) -> None:
        """Requests that fit alone, most of them longer than their share of the pool."""
        for _ in range(count):
            self.add_one(data)

    def add_one(self, data: st.DataObject) -> None:
        can_fork = self.profile.can(Capability.FORK) and self.config.max_num_seqs > 1
        samples = data.draw(
            st.integers(1, min(3, self.config.max_num_seqs)) if can_fork else st.just(1), label="samples"
        )
        spare = data.draw(st.sampled_from([0, 0, 1, 2]), label="room for forks")
        per_seq = len(all_blocks(self.judged.state)) // (samples + spare) * self.config.block_size
        longest = max(1, min(per_seq, self.config.max_model_len - 1))
        shorter = st.integers(1, max(1, longest // 2))
        length = data.draw(st.one_of(shorter, shorter, st.integers(1, longest)), label="prompt length")
        prompt, salt = self.draw_prompt(data, length, longest)
        length = len(prompt)
        most = max(1, min(per_seq - length + 1, self.config.max_model_len - length))
        self.num_requests += 1
        gone = [i for i in range(self.num_requests - 1) if i not in self.judged.state.requests]
        again = st.sampled_from([self.num_requests - 1] * 3 + gone[:1])
        self.judged.add(
            Request(
                request_id=data.draw(again, label="request_id"),
                prompt=prompt,
                max_tokens=data.draw(st.one_of(st.just(most), st.integers(1, most)), label="max_tokens"),
                seq_ids=self.fresh_seqs(samples),
                stop_token_ids=(STOP,) if data.draw(st.booleans(), label="stops") else (),
                priority=data.draw(st.integers(0, 2), label="priority") if self.config.policy is Policy.PRIORITY else 0,
                cache_salt=salt,
            )
        )

    def draw_prompt(self, data: st.DataObject, length: int, longest: int) -> tuple[Prefix, str]:
        """A prompt and its salt, often one that begins with what is cached."""
        tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length), label="prompt"))
        if not self.config.prefix_cache:
            return tokens, ""
        key = data.draw(st.sampled_from([None, *self.judged.state.cached.values()]), label="key")
        if key is not None:
            return (key.tokens + tokens)[:longest], key.salt
        return tokens, data.draw(st.sampled_from(["", "a"]), label="salt")

    @rule(data=st.data())
    def add_what_is_refused(self, data: st.DataObject) -> None:
        """Nothing comes in that an empty engine cannot serve, or that uses a name twice."""
        num_slots = len(all_blocks(self.judged.state)) * self.config.block_size
        long = (0,) * (num_slots + 1)
        bad = [
            Request(self.num_requests, (), 1, self.fresh_seqs(1)),
            Request(self.num_requests, (0,), 0, self.fresh_seqs(1)),
            Request(self.num_requests, (0,), 1, ()),
            Request(self.num_requests, (0,), self.config.max_model_len, self.fresh_seqs(1)),
            Request(self.num_requests, (0,), 1, self.fresh_seqs(self.config.max_num_seqs + 1)),
            Request(self.num_requests, long, 1, self.fresh_seqs(1)),
            Request(self.num_requests, (0,), num_slots + 1, self.fresh_seqs(1)),
        ]
        state = self.judged.state
        bad += [Request(i, (0,), 1, self.fresh_seqs(1)) for i in state.requests]
        bad += [Request(self.num_requests, (0,), 1, (i,)) for i in state.seqs]
        gone = [i for i in seq_ids_in_use(state) if i not in state.seqs]  # aborted in flight, or promised to a sample
        bad += [Request(self.num_requests, (0,), 1, (i,)) for i in gone] * 5
        self.num_requests += 1
        if self.judged.add(data.draw(st.sampled_from(bad), label="request")):
            raise AssertionError("an engine took a request that it had to refuse, and no rule noticed")

    @precondition(lambda self: not self.judged.state.flights)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        """An idle engine makes steps as well, and reports nothing."""
        for _ in range(count if self.judged.state.requests else 1):
            self.judged.step(next_token)

    @precondition(lambda self: self.profile.can(Capability.OVERLAP))
    @rule()
    def begin_step(self) -> None:
        is_full = len(self.judged.state.flights) == 2
        if (self.judged.begin_step() is None) != is_full:
            raise AssertionError(f"a step {'began' if is_full else 'did not begin'}, and no rule noticed")

    @precondition(lambda self: self.profile.can(Capability.OVERLAP))
    @rule()
    def end_step(self) -> None:
        self.judged.end_step(next_token)

    @precondition(lambda self: self.profile.can(Capability.OVERLAP) and self.judged.state.requests)
    @rule(data=st.data(), count=st.integers(1, 6))
    def overlap_steps(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if data.draw(st.integers(0, 4), label="arrives meanwhile") == 0:
                self.judged.begin_step()
                self.add_one(data)
            self.overlap_step()

    def overlap_step(self) -> None:
        """The oldest step ends while the next one is in flight, if there is anything to schedule."""
        self.judged.begin_step()
        if len(self.judged.state.flights) == 1:
            self.judged.begin_step()
        self.judged.end_step(next_token)

    @precondition(lambda self: self.profile.can(Capability.FORK) and self.forkable())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.judged.fork(data.draw(st.sampled_from(self.forkable()), label="parent"), self.fresh_seqs(1)[0])

    @precondition(lambda self: self.profile.can(Capability.FORK) and self.judged.state.requests)
    @rule(data=st.data(), count=st.integers(1, 3))
    def advance_and_fork(self, data: st.DataObject, count: int) -> None:
        """Forks are rare otherwise: most sequences end before somebody thinks of it. Several of one sequence share its
        last block."""
        if self.judged.state.flights:
            self.judged.end_step(next_token)
        else:
            self.judged.step(next_token)
        parents = self.forkable()
        for parent in data.draw(st.lists(st.sampled_from(parents), max_size=count), label="parents") if parents else []:
            self.judged.fork(parent, self.fresh_seqs(1)[0])

    @precondition(lambda self: self.profile.can(Capability.FORK) and self.judged.state.requests)
    @rule(data=st.data())
    def fork_what_is_refused(self, data: st.DataObject) -> None:
        """No fork of nobody, none of a sequence that waits or is in flight, and none under a name that is in use."""
        state, fresh = self.judged.state, self.fresh_seqs(1)[0]
        waiting = [i for i, seq in state.seqs.items() if seq.request_id in state.waiting]
        in_flight = [i for i, seq in state.seqs.items() if seq.num_scheduled_tokens]
        bad = [
            (fresh, fresh),
            *((i, fresh) for i in (*waiting, *in_flight)),
            *((i, j) for i in self.forkable() for j in state.seqs),
        ]
        parent, child = data.draw(st.sampled_from(bad), label="fork")
        self.judged.fork(parent, child)

    @precondition(lambda self: self.profile.can(Capability.ABORT) and self.judged.state.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.judged.abort(data.draw(st.sampled_from(list(self.judged.state.requests)), label="request"))

    @precondition(lambda self: self.profile.can(Capability.ABORT, Capability.OVERLAP) and self.judged.state.requests)
    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        """The step goes on, and its sequences are gone; their names are free when it ends."""
        self.judged.begin_step()
        state = self.judged.state
        in_flight = sorted({seq.request_id for seq in state.seqs.values() if seq.num_scheduled_tokens})
        if in_flight:
            self.judged.abort(data.draw(st.sampled_from(in_flight), label="request"))
            if data.draw(st.booleans(), label="again"):
                self.add_what_is_refused(data)

    @precondition(lambda self: self.profile.can(Capability.ABORT) and self.num_requests > 0)
    @rule(data=st.data())
    def abort_what_is_gone(self, data: st.DataObject) -> None:
        gone: list[RequestId] = [i for i in range(self.num_requests) if i not in self.judged.state.requests]
        if gone:
            self.judged.abort(data.draw(st.sampled_from(gone), label="request"))

    @precondition(lambda self: self.judged.state.cached)
    @rule(chance=st.integers(0, 5))
    def reset_cache(self, chance: int) -> None:
        """Now and then: an empty cache has no bugs."""
        if chance == 0:
            self.judged.reset_cache()

    def teardown(self) -> None:
        """Whatever was left ends, in a bounded number of steps, and then the engine holds nothing.

        An engine that overlaps its steps has two in flight all the time, if it can.
        """
        if not hasattr(self, "judged") or not self.judged.is_sound:
            return
        state = self.judged.state
        left = sum(len(r.seq_ids) * (len(r.prompt) + 2 * r.max_tokens) for r in state.requests.values())
        for _ in range((left + 1) * (len(state.requests) + 1) + 2):
            if not self.judged.state.requests and not self.judged.state.flights:
                return self.holds_nothing()
            if self.profile.can(Capability.OVERLAP):
                self.overlap_step()
            else:
                self.judged.step(next_token)
        raise AssertionError(f"these requests never end: {sorted(self.judged.state.requests)}")

    def holds_nothing(self) -> None:
        """The engine is empty: every block is free, cached or not, on the device and in host memory."""
        state, config = self.judged.state, self.config
        if len(state.free) < config.num_blocks - self.profile.num_reserved_blocks:
            raise AssertionError(f"all requests have ended, and these blocks are free: {sorted(state.free)}")
        if len(state.host_free) < config.num_host_blocks:
            raise AssertionError(f"all requests have ended, and these host blocks are free: {sorted(state.host_free)}")


class LockstepMachine(EngineMachine):
    """Two engines, told the same. ``second`` makes the other one."""

    second: EngineFactory

    def make(self, config: Config) -> LockstepEngine:
        return LockstepEngine(type(self).factory(config), type(self).second(config), config)


def machine_for(factory: EngineFactory) -> type[EngineMachine]:
    """The machine that drives the engines of this factory."""
    profile = factory(Config(num_blocks=8)).profile
    name = f"{profile.name.title()}Machine"
    return type(name, (EngineMachine,), {"factory": staticmethod(factory), "profile": profile})


def lockstep_machine_for(first: EngineFactory, second: EngineFactory) -> type[LockstepMachine]:
    """The machine that drives two engines beside each other, over what both can do."""
    profile = common(first(Config(num_blocks=8)).profile, second(Config(num_blocks=8)).profile)
    attributes = {"factory": staticmethod(first), "second": staticmethod(second), "profile": profile}
    return type("PairMachine", (LockstepMachine,), attributes)
