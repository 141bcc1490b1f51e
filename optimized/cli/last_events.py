"""What led to a broken rule, for whoever let an engine be judged and not be written down: its last events, in a file."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from optimized.model_store import home
from optimized.one_by_one import in_batches
from spec.batches import Computed
from spec.choices import Choices
from spec.engine import Observer
from spec.rules import RuleViolation
from spec.trace import Writer, gap_line, part_of
from spec.vocabulary import Config, Event, SeqId, State, Token

MOST_EVENTS = 100_000
MOST_NUMBERS = 2_000_000
"""So many events are kept at most, and so many numbers of what they tell at length: a read of one token names every slot before it."""
MOST_FILES = 8
FOLDER = "violations"
SHOWN = "This is what the engine shows after its events, which no log has."


class Violations:
    """The files of a process in which the events before broken rules are."""

    def __init__(
        self, most_events: int = MOST_EVENTS, folder: Path | None = None, most_numbers: int = MOST_NUMBERS
    ) -> None:
        """``most_events`` are kept of each engine, and at least its last call. Without a ``folder``, one in ``KVPROOF_HOME``."""
        self.most_events = most_events
        self.most_numbers = most_numbers
        self.folder = folder
        self.num_files = 0

    def begin(self, config: Config, engine: str, choices: Choices, judge: Observer) -> LastEvents:
        """Who tells a judge of an engine's events, and keeps the last ones."""
        return LastEvents(self, config, engine, choices, judge)

    def file(self) -> Path | None:
        """A name for one more; None if there are so many that one more would say nothing new."""
        if self.num_files == MOST_FILES:
            return None
        self.num_files += 1
        folder = self.folder or home() / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        return folder / f"{stamp}-{os.getpid()}-{self.num_files}.jsonl"


class LastEvents:
    """Tells a judge, and keeps the last events. When it finds that a rule is broken they are written, and it says where."""

    def __init__(self, violations: Violations, config: Config, engine: str, choices: Choices, judge: Observer) -> None:
        self._violations = violations
        self._of = (config, engine, choices)
        self._judge = in_batches(judge, config.block_size)
        self._told = deque[tuple[int, int, str, tuple[Any, ...]]]()
        """How many events each call told of, in how many numbers at length, its name, and what it told."""
        self._num_kept = 0
        self._num_numbers = 0
        self._num_gone = 0
        self._note: str | None = None

    def event(self, event: Event) -> None:
        self._keep(1, sum([len(each) for each in vars(event).values() if type(each) is tuple]), "event", event)
        try:
            self._judge.event(event)
        except RuleViolation as violation:
            self._tell(violation)
            raise

    def allocated(self, seqs: Sequence[SeqId]) -> None:
        """A token's room for each of these sequences."""
        self._keep(len(seqs), 0, "allocated", tuple(seqs))
        try:
            self._judge.allocated(seqs)
        except RuleViolation as violation:
            self._tell(violation)
            raise

    def computed(self, step: Computed) -> None:
        """The writes of a step, and its reads."""
        self._keep(len(step), sum(map(len, step.tables.values())), "computed", step)
        try:
            self._judge.computed(step)
        except RuleViolation as violation:
            self._tell(violation)
            raise

    def appended(self, seqs: Sequence[SeqId], tokens: Sequence[Token]) -> None:
        """A token for each of these sequences."""
        self._keep(len(seqs), 0, "appended", tuple(seqs), tuple(tokens))
        try:
            self._judge.appended(seqs, tokens)
        except RuleViolation as violation:
            self._tell(violation)
            raise

    def settled(self, snapshot: Callable[[], State]) -> None:
        """The judge may look."""
        try:
            self._judge.settled(snapshot)
        except RuleViolation as violation:
            self._tell(violation, is_shown=True)
            raise

    def _keep(self, num_events: int, num_numbers: int, name: str, *told: object) -> None:
        self._told.append((num_events, num_numbers, name, told))
        self._num_kept += num_events
        self._num_numbers += num_numbers
        limits = self._violations
        while self._num_kept > limits.most_events or self._num_numbers > limits.most_numbers:
            if len(self._told) == 1:
                break
            gone, numbers, _, _ = self._told.popleft()
            self._num_kept -= gone
            self._num_numbers -= numbers
            self._num_gone += gone

    def _tell(self, violation: RuleViolation, *, is_shown: bool = False) -> None:
        """Add where the events are. An engine that is given up may break another rule: that changes nothing."""
        if self._note is None:
            self._note = self._written()
            if is_shown:
                self._note = f"{SHOWN} {self._note}"
        violation.add_note(self._note)

    def _written(self) -> str:
        """Write the events. Where they are, or why they are nowhere."""
        try:
            path = self._violations.file()
            if path is None:
                return f"Its events are not written: there are {MOST_FILES} files of this process."
            writer = _Private(path, *self._of)
            if not self._num_gone:
                self._tell_all(writer)
                writer.close()
                return f"Its events are in {path}, prompts included: kvproof trace check {path}"
            writer.write(gap_line(f"{self._num_gone} events, and {self._num_kept} follow"))
            self._tell_all(writer)
            writer.flush()
            writer.leave()
        except OSError as error:
            return f"Its events can not be written: {error}"
        return (
            f"The last {self._num_kept} events are in {writer.part}, prompts included, to be read; those before them are "
            f"missing, so kvproof trace check can not judge them. --trace FILE writes all."
        )

    def _tell_all(self, writer: Writer) -> None:
        for _, _, name, told in self._told:
            getattr(writer, name)(*told)


class _Private(Writer):
    """A log that nobody else may read."""

    def __init__(self, path: Path, config: Config, engine: str, choices: Choices) -> None:
        os.close(os.open(part_of(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        super().__init__(path, config, engine, choices)
