"""Grammars: which tokens may come next in an answer, as a function of its tokens so far. llguidance knows how."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from optimized.fault_points import FaultPoint, reach
from optimized.grammar_trial import limits
from optimized.request_times import Buckets
from optimized.sampling import NoToken
from optimized.structured_outputs import StructuredOutputsParams
from spec.engine import InvalidRequest
from spec.vocabulary import Token

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from optimized.checkpoint import Checkpoint

TRIAL = Path(__file__).with_name("grammar_trial.py")
TRIAL_S = 20
"""The trial ends itself after its processor's time; this is how much longer it has on a machine that gives it none."""

BYTES_OF_ONE, BYTES_PER_BYTE = 24 << 10, 64
"""What a grammar that is kept takes, and more for each byte of it: as measured with llguidance 1.9, a bit more."""

TIME_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0)

Bools = npt.NDArray[np.bool_]
Key = tuple[str, str]


STOPPED = "the answer's grammar stopped"
"""How the reason begins that a request is told."""


class GrammarStopped(NoToken):
    """A grammar has no next token for one sequence; only its request is concerned."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{STOPPED}: {why}")


@dataclass(frozen=True)
class GrammarLimits:
    """What may be spent on grammars: milliseconds of a processor's time to make one, and memory for those that are kept."""

    cpu_ms: int = 2000
    cache_bytes: int = 64 << 20


class Grammar:
    """What answers look like: the beginning of each. ``num_bytes`` is about what it takes in memory."""

    def __init__(self, begin: LLMatcher, vocab_size: int, num_bytes: int = 0) -> None:
        self.begin = begin
        self.vocab_size = vocab_size
        self.num_bytes = num_bytes

    def progress(self) -> Progress:
        """An answer that has not begun."""
        return Progress(self)


@dataclass(frozen=True)
class Barred:
    """What may not come in the answers to a request: the token ids of bad words, and what a grammar does not allow."""

    words: tuple[tuple[Token, ...], ...] = ()
    grammar: Grammar | None = None


class Progress:
    """The way of one sequence through a grammar.

    What it remembers is only a shortcut: whatever was asked before, the answer depends on the output that is given, and
    so a sequence that was preempted, forked or swapped goes on where its tokens are.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.begin.deep_copy()
        self._read: list[Token] = []

    def allowed(self, output: Sequence[Token]) -> Bools:
        """Which tokens may follow this output, ``[vocab_size]``. Raises ``GrammarStopped``. O(tokens + vocabulary)."""
        reach(FaultPoint.FOLLOW_GRAMMAR)
        if self._read != list(output[: len(self._read)]):
            self._matcher, self._read = self._grammar.begin.deep_copy(), []
        new = list(output[len(self._read) :])
        self._matcher.consume_tokens(new)
        self._read += new
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarStopped(_plain(self._matcher.get_error()))
        found = np.unpackbits(bits, bitorder="little", count=self._grammar.vocab_size).view(np.bool_)
        if not found.any():
            raise GrammarStopped("the vocabulary has no token for what comes next")
        return found


class Grammars:
    """The grammars of one model, each made once; any thread may ask."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.limits = GrammarLimits()
        self.num_kept_bytes = 0
        self.times = Buckets(TIME_BUCKETS)
        """Seconds that it took to make each, or to find that it can not be made."""
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Grammar] = OrderedDict()

    def grammar(self, asked: StructuredOutputsParams) -> Grammar:
        """What a caller asks for. Raises ``InvalidRequest`` if it cannot be, or takes too much to make."""
        reach(FaultPoint.MAKE_GRAMMAR)
        key = asked.kind, asked.text
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            started = time.monotonic()
            try:
                found = self._made(asked)
            finally:
                with self._lock:
                    self.times.add(time.monotonic() - started)
        with self._lock:
            self._keep(key, found)
        return found

    def _keep(self, key: Key, found: Grammar) -> None:
        """In case somebody asks for the same again; those that nobody has asked for the longest go first. With the lock."""
        if (before := self._kept.pop(key, None)) is not None:
            self.num_kept_bytes -= before.num_bytes
        self._kept[key] = found
        self.num_kept_bytes += found.num_bytes
        while self.num_kept_bytes > self.limits.cache_bytes:
            self.num_kept_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _made(self, asked: StructuredOutputsParams) -> Grammar:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._checkpoint)
        from llguidance import LLMatcher

        form = _tried(asked, self.limits.cpu_ms)
        matcher = LLMatcher(self._tokenizer, form, log_level=0, limits=limits())
        num_bytes = BYTES_OF_ONE + BYTES_PER_BYTE * (len(form.encode()) + len(asked.text.encode()))
        grammar = Grammar(matcher, self._checkpoint.config.vocab_size, num_bytes)
        try:
            grammar.progress().allowed(())
        except GrammarStopped as error:
            raise asked.refused(_short(asked.text), f"something that has an answer ({error})") from error
        return grammar


def _tokenizer(checkpoint: Checkpoint) -> LLTokenizer:
    """The model's tokens as llguidance knows them."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise InvalidRequest("structured outputs need the extra 'grammar': pip install 'kvproof[grammar]'") from error
    if checkpoint.tokenizer is None:
        raise InvalidRequest(f"{checkpoint.name} has no tokenizer: structured outputs have no meaning")
    ends = list(checkpoint.config.eos_token_ids)
    if not ends:
        raise InvalidRequest(f"{checkpoint.name} has no token that ends a text: structured outputs would have no end")
    try:
        return LLTokenizer(checkpoint.tokenizer.backend.to_str(), n_vocab=checkpoint.config.vocab_size, eos_token=ends)
    except Exception as error:  # the library raises what it likes
        raise InvalidRequest(
            f"the tokenizer of {checkpoint.name} is none for grammars: {_plain(str(error))}"
        ) from error


def _tried(asked: StructuredOutputsParams, cpu_ms: int) -> str:
    """The grammar in llguidance's own form, after a process of its own has made it within its limits."""
    command, said = (
        [sys.executable, "-P", str(TRIAL)],
        json.dumps({"kind": asked.kind, "text": asked.text, "cpu_ms": cpu_ms}),
    )
    try:
        most = TRIAL_S + cpu_ms / 1000
        done = subprocess.run(command, input=said, capture_output=True, timeout=most, text=True, check=False)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        raise asked.too_complex(_short(asked.text), "a grammar that takes less time and memory to make")
    found = json.loads(done.stdout)
    if "error" in found:
        raise asked.refused(_short(asked.text), f"a {asked.kind} that can be followed: {_plain(found['error'])}")
    return str(found["grammar"])


def _plain(message: str) -> str:
    """What a library says, in one line, without addresses of its code."""
    line = " ".join(message.split("<")[0].split())
    return line if len(line) <= 200 else f"{line[:197]}..."


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
