"""Fixed stories: calls that somebody thought of, each for something that a search by chance rarely comes by."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spec.conformance.machine import next_token
from spec.conformance.story import Call
from spec.engine import Capability, Profile
from spec.scope import Move, Scope, needs
from spec.vocabulary import Config, Policy, Prefix, Recovery, Request, RequestId, SeqId, Token

Calls = tuple[Call, ...]
STEP, BEGIN, END = Call("step", (next_token,)), Call("begin_step"), Call("end_step", (next_token,))


@dataclass(frozen=True)
class FixedStory:
    """The limits, and the calls in their order. ``more`` is what a profile must declare that the calls do not show; with
    ``insists`` the admission rule of the limits is part of the story."""

    name: str
    config: Config
    calls: Calls
    more: frozenset[Capability] = frozenset()
    insists: bool = False

    @property
    def needed(self) -> frozenset[Capability]:
        """What a profile declares whose engine can be told this story."""
        names = {call.method for call in self.calls}
        moves = [each for call in self.calls for each in call.arguments if isinstance(each, Move)]
        samples = [each for call in self.calls for each in call.arguments if isinstance(each, Request)]
        scope = Scope(
            self.config,
            operations=frozenset(move.operation for move in moves),
            max_flights=int(not names.isdisjoint({"begin_step", "end_step"}))
            + sum(move.operation == "submit" for move in moves),
        )
        forks = "fork" in names or any(len(request.seq_ids) > 1 for request in samples)
        wanted = {
            Capability.FORK: forks,
            Capability.COPY_ON_WRITE: forks,
            Capability.ABORT: "abort" in names,
            Capability.SWAP: self.config.recovery is Recovery.SWAP or self.config.num_host_blocks > 0,
            Capability.PRIORITY: self.config.policy is Policy.PRIORITY,
            Capability.STATIC_BATCHES: self.config.policy is Policy.STATIC,
            Capability.PARTIAL_PREFILLS: self.config.max_num_partial_prefills > 1,
            Capability.CHUNKED_PREFILL: self.config.max_num_batched_tokens
            < Config(num_blocks=1).max_num_batched_tokens,
        }
        return self.more | needs(scope) | {capability for capability, is_wanted in wanted.items() if is_wanted}

    def lacking(self, profile: Profile) -> str | None:
        """Why an engine or a pool of this profile is not told the story."""
        missing = sorted(each.name for each in self.needed - profile.capabilities)
        if missing:
            return f"the profile of {profile.name} does not declare {', '.join(missing)}"
        if self.insists and self.config.admission_rule not in profile.admission_rules:
            return f"the profile of {profile.name} does not name the admission rule {self.config.admission_rule.name}"
        return None

    def limits(self, profile: Profile) -> Config:
        """The limits for an engine of this profile: with its own blocks besides, and an admission rule that it has."""
        rules = profile.admission_rules
        rule = self.config.admission_rule if self.config.admission_rule in rules else rules[0]
        num_blocks = self.config.num_blocks + profile.num_reserved_blocks
        return replace(self.config, num_blocks=num_blocks, admission_rule=rule)


# Calls


def ask(
    request_id: RequestId, prompt: Iterable[Token], max_tokens: int, *seq_ids: SeqId, priority: int = 0, **more: object
) -> Call:
    """A request comes in, by itself under its own name as that of its sequence."""
    made = Request(request_id, tuple(prompt), max_tokens, seq_ids or (request_id,), priority=priority)
    return Call("add", (replace(made, **more),))  # type: ignore[arg-type]  # fields of a request


def fork(parent: SeqId, child: SeqId) -> Call:
    return Call("fork", (parent, child))


def abort(request_id: RequestId) -> Call:
    return Call("abort", (request_id,))


RESET = Call("reset_cache")


def steps(count: int) -> Calls:
    """So many steps, one after the other."""
    return (STEP,) * count


def ahead(count: int) -> Calls:
    """So many steps, of which the next one begins before the one before it ends; one is in flight afterwards."""
    return (BEGIN,) + (BEGIN, END) * count


def move(operation: str, seq: SeqId = 0, tokens: Prefix = (), child: SeqId = 0, number: int = 0) -> Call:
    """A call of a pool."""
    return Call("call", (Move(operation, seq, tokens, child, number),))


def mistake(operation: str, seq: SeqId = 0, tokens: Prefix = (), child: SeqId = 0, number: int = 0) -> Call:
    """The same, where it is its caller's mistake."""
    return Call("mistake", (Move(operation, seq, tokens, child, number),))
