"""Beam search: the likeliest whole answers, several at a time, as forks of one prompt.

After each step every beam has a row of log probabilities. Of all continuations of all beams the ``beam_width`` likeliest
that do not end go on; a beam that has several of them is forked, one that has none is released, and so the beams share
every block but those in which they differ. A continuation that ends is a hypothesis, if it is among the ``beam_width``
likeliest of all. Scores are log probabilities over ``length ** length_penalty``, the length that of the answer. Of equal
continuations the earlier beam's comes first, then the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from optimized.device import Branches, Failure, Sampled
from optimized.outputs import CompletionOutput, RequestOutput
from optimized.pool import blocks_needed
from optimized.sampling import BadLogits, SamplingParams, demand_integer, demand_number, log_softmax
from spec.engine import InvalidField
from spec.vocabulary import FinishReason, Request, RequestId, SeqId, Token

if TYPE_CHECKING:
    from optimized.model_core import ModelCore
    from optimized.tokenizer import Tokenizer

MAX_BEAMS = 64


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search; names are vLLM's. A ``length_penalty`` above 0 favours long answers, one below 0 short ones.

    With ``early_stopping`` a search ends as soon as it has ``beam_width`` hypotheses; without, when no beam can become
    better than the worst of them.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        demand_integer("beam_width", self.beam_width, 1, MAX_BEAMS)
        demand_integer("max_tokens", self.max_tokens, 1, 1 << 31)
        demand_number("length_penalty", self.length_penalty, -10.0, 10.0)
        for name in ("ignore_eos", "early_stopping"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidField(name, getattr(self, name), "True or False")


@dataclass(frozen=True)
class Hypothesis:
    """One answer with the sum of its log probabilities. ``is_ended`` says that its last token ends it."""

    token_ids: tuple[Token, ...]
    log_probability: float
    is_ended: bool = False

    def score(self, length_penalty: float) -> float:
        """What hypotheses are compared by."""
        return self.log_probability / math.pow(len(self.token_ids), length_penalty)


class BeamSearch:
    """One search. ``seq_ids`` are the beams of its request, the first of which has the prompt; ``new_seq_id`` names more."""

    def __init__(
        self,
        params: BeamSearchParams,
        end_token_ids: Sequence[Token],
        seq_ids: Sequence[SeqId],
        new_seq_id: Callable[[], SeqId],
    ) -> None:
        self.params = params
        self.ends = frozenset(() if params.ignore_eos else end_token_ids)
        self.beams: dict[SeqId, Hypothesis] = {}
        self.failure: str | None = None
        self._seq_ids = tuple(seq_ids)
        self._new_seq_id = new_seq_id
        self._hypotheses: list[Hypothesis] = []

    @property
    def has_begun(self) -> bool:
        """Whether the prompt is computed."""
        return bool(self.beams or self._hypotheses or self.failure)

    @property
    def is_open(self) -> bool:
        """Whether a beam goes on."""
        return any(len(beam.token_ids) < self.params.max_tokens for beam in self.beams.values())

    def results(self) -> list[Hypothesis]:
        """The best hypotheses, at most ``beam_width``, the best first."""
        return sorted(self._hypotheses, key=self._score, reverse=True)[: self.params.beam_width]

    def output(
        self, name: str, prompt: str | None, token_ids: list[Token], tokenizer: Tokenizer | None
    ) -> RequestOutput:
        """What was found, in the shape of any other answer."""
        outputs = []
        for index, answer in enumerate(self.results()):
            shown = list(answer.token_ids[:-1] if answer.is_ended else answer.token_ids)
            text = "" if tokenizer is None else tokenizer.decode(shown)
            reason = (FinishReason.STOP if answer.is_ended else FinishReason.LENGTH).value
            found = CompletionOutput(index, text, list(answer.token_ids), reason)
            outputs.append(replace(found, cumulative_logprob=answer.log_probability))
        if self.failure is not None:
            outputs = [CompletionOutput(0, "", [], "error", self.failure)]
        return RequestOutput(name, prompt, token_ids, outputs, finished=True)

    def choose(self, logits: Mapping[SeqId, npt.NDArray[np.float32]]) -> dict[SeqId, Sampled]:
        """How each beam goes on, given its logits ``[vocab_size]``: every live beam is there, or at first every sequence.

        A row without numbers ends the search.
        """
        expected = self.beams or self._seq_ids
        if logits.keys() != set(expected):
            raise RuntimeError(f"a search needs its beams {sorted(expected)} in one step, it got {sorted(logits)}")
        if not all(np.isfinite(row.max()) for row in logits.values()):
            self.failure = str(BadLogits(math.nan, sum(int(np.isnan(row).sum()) for row in logits.values())))
            self.beams = {}
            return {seq_id: Failure(self.failure) for seq_id in logits}
        if not self.has_begun:
            # All sequences of the request are about to be forked from the prompt, and have its logits.
            going_on = self._step({self._seq_ids[0]: Hypothesis((), 0.0)}, logits)
            self.beams = {seq_id: beam for seq_id, (_, beam) in zip(self._seq_ids, going_on, strict=False)}
            return {i: self.beams[i].token_ids[-1] if i in self.beams else Branches(()) for i in self._seq_ids}
        going_on = self._step(self.beams, logits)
        parents = list(self.beams)
        self.beams, branches = {}, {seq_id: list[tuple[SeqId, Token]]() for seq_id in parents}
        for parent, hypothesis in going_on:
            seq_id = self._new_seq_id() if branches[parent] else parent
            branches[parent].append((seq_id, hypothesis.token_ids[-1]))
            self.beams[seq_id] = hypothesis
        return {parent: Branches(tuple(tokens)) for parent, tokens in branches.items()}

    def _step(
        self, beams: Mapping[SeqId, Hypothesis], logits: Mapping[SeqId, npt.NDArray[np.float32]]
    ) -> list[tuple[SeqId, Hypothesis]]:
        """The beams that go on, each with the one that it comes from; none if the search is over."""
        width, candidates = self.params.beam_width, []
        for place, (seq_id, beam) in enumerate(beams.items()):
            for token, logprob in _likeliest(log_softmax(logits[seq_id]), width + len(self.ends)):
                candidates.append((-(beam.log_probability + logprob), place, token, seq_id, beam))
        candidates.sort(key=lambda each: each[:3])
        going_on: list[tuple[SeqId, Hypothesis]] = []
        for rank, (cost, _, token, seq_id, beam) in enumerate(candidates):
            if len(going_on) == width:
                break
            hypothesis = Hypothesis((*beam.token_ids, token), -cost, token in self.ends)
            if not hypothesis.is_ended:
                going_on.append((seq_id, hypothesis))
            elif rank < width:
                self._hypotheses.append(hypothesis)
        if not going_on or self._is_over(going_on[0][1]):
            return []
        if len(going_on[0][1].token_ids) == self.params.max_tokens:
            self._hypotheses += [hypothesis for _, hypothesis in going_on]
        return going_on

    def _is_over(self, best: Hypothesis) -> bool:
        """Whether nothing that ``best``, the likeliest live beam, becomes can be among the results."""
        done = self.results()
        if len(done) < self.params.beam_width:
            return False
        if self.params.early_stopping:
            return True
        # A sum of log probabilities only falls; a longer answer divides it by more, or by less if the penalty is below 0.
        penalty = self.params.length_penalty
        length = self.params.max_tokens if penalty > 0.0 else len(best.token_ids)
        return self._score(done[-1]) >= best.log_probability / math.pow(length, penalty)

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.score(self.params.length_penalty)


class Searches:
    """Several prompts searched at once, as many as can never take each other's blocks.

    The beams of a search go on together: all of them have their logits in the same step. So no search may be preempted,
    and none may be cut by the token budget, which is why a prompt begins only when those before it have.
    """

    def __init__(self, core: ModelCore, params: BeamSearchParams, new_seq_id: Callable[[], SeqId]) -> None:
        self.core = core
        self.params = params
        self._new_seq_id = new_seq_id
        self._running: list[tuple[Request, BeamSearch]] = []

    def run(
        self,
        prompts: Sequence[Sequence[Token]],
        first_request_id: RequestId,
        end_token_ids: Sequence[Token],
        progress: Callable[[int], object],
    ) -> list[BeamSearch]:
        """Search every prompt, in their order. Raises ``InvalidRequest`` before anything begins if one can not be served."""
        waiting = []
        for request_id, prompt in enumerate(prompts, start=first_request_id):
            seq_ids = tuple(self._new_seq_id() for _ in range(self.params.beam_width))
            request = Request(request_id, tuple(prompt), self.params.max_tokens, seq_ids)
            self.core.check(request, SamplingParams(temperature=0.0))
            waiting.append((request, BeamSearch(self.params, end_token_ids, seq_ids, self._new_seq_id)))
        searches = [search for _, search in waiting]
        waiting.reverse()
        try:
            while waiting or self._running:
                if waiting and self._has_room(waiting[-1][0]):
                    self._running.append(waiting.pop())
                    self.core.add_beams(*self._running[-1])
                self.core.step()
                done = [each for each in self._running if each[1].has_begun and not each[1].is_open]
                self._running = [each for each in self._running if each not in done]
                progress(len(done))
        finally:
            for request, _ in self._running:  # nobody is left to hear them
                self.core.abort(request.request_id)
        return searches

    def _has_room(self, request: Request) -> bool:
        """Whether the request fits beside the running ones to the end of all of them, and they have all begun."""
        config, requests = self.core.config, [request, *(running for running, _ in self._running)]
        width = self.params.beam_width
        blocks = sum(width * blocks_needed(len(each.prompt) + each.max_tokens, config.block_size) for each in requests)
        return len(requests) == 1 or (
            all(search.has_begun for _, search in self._running)
            and len(requests) * width <= min(config.max_num_seqs, config.max_num_batched_tokens)
            and blocks <= config.num_blocks
        )


def _likeliest(logprobs: npt.NDArray[np.float64], count: int) -> list[tuple[Token, float]]:
    """The tokens of the largest log probabilities, equal ones by rising id; those of probability 0 are none."""
    least = np.partition(logprobs, -count)[-count] if count < len(logprobs) else -np.inf
    near = np.flatnonzero((logprobs >= least) & (logprobs > -np.inf))
    near = near[np.argsort(-logprobs[near], kind="stable")][:count]
    return [(int(token), float(logprobs[token])) for token in near]
