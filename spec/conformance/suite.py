"""One run of the suite: what its options say, which tests they leave out, and what came of each test."""

import json
import math
import platform
import re
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from spec.conformance.guard import AdapterFault
from spec.conformance.story import Failed, Setting, headline
from spec.conformance.target import BadTarget, Kind, Target, load
from spec.engine import Profile

FOLDER = Path(__file__).parent
SECURITY = "SECURITY"
LEVELS: Mapping[str, str] = {
    "L0": "allocator",
    "L1": "sharing and prefix cache",
    "L2": "scheduler",
    "L3": "preemption",
    "L4": "attention kernel",
    "L5": "served text",
    SECURITY: "a server under attack",
}
NO_ENGINE = "no engine is given: --engine MODULE:NAME"
NO_ATTACK = "a server is attacked only if asked to: --conformance-level security"
NO_SERVER = "no server is given: --conformance-url http://host:port/v1"
REPORT_FORMAT, REPORT_VERSION = "kvproof conformance report", 1
MAX_EXAMPLES = 100
PROPERTY = "kvproof"
"""The name under which a report of pytest's carries ours."""


class Incomplete(Exception):
    """A test was cut off by the time budget: it neither passed nor failed."""

    def __init__(self, budget_s: float, done: str) -> None:
        super().__init__(f"the time budget of {budget_s:g} s is spent, after {done}")


class Suite:
    """The options of a run as values, and the hooks that keep to them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.begin = time.monotonic()
        self.levels = _levels(config.getoption("conformance_level"))
        self.max_examples = int(_number(config, "conformance_max_examples", whole=True) or MAX_EXAMPLES)
        self.budget_s = _number(config, "conformance_time_budget")
        self.url = _url(config.getoption("conformance_url"))
        self.keys: list[str] = config.getoption("conformance_key") or []
        self.skips = _ids(config, "conformance_skips")
        self.xfails = _ids(config, "conformance_xfails")
        self.report_path = _path(config, "conformance_report")
        self.targets = _targets(config.getoption("engine") or [], config.invocation_params.dir)
        self.outcomes: dict[str, dict[str, object]] = {}

    def target(self, *kinds: Kind) -> Target:
        """The target of one of these kinds; without it the test is skipped."""
        for kind in kinds:
            if kind in self.targets:
                return self.targets[kind]
        if not self.targets:
            pytest.skip(NO_ENGINE)
        given = " and ".join(kind.value for kind in self.targets)
        pytest.skip(f"this judges {' or '.join(kind.value for kind in kinds)}, and --engine names {given}")

    def check_time(self, done: Callable[[], str]) -> None:
        """Raises ``Incomplete`` when the time budget is spent."""
        if self.budget_s is not None and time.monotonic() - self.begin > self.budget_s:
            raise Incomplete(self.budget_s, done())

    def setting(self, target: Target, judge: str = "judged_engine") -> Setting:
        """How a test makes what is judged."""
        module, _, path = target.name.partition(":")
        judge = "judged_pool" if target.kind is Kind.POOL else judge
        imports = {module: frozenset({path.partition(".")[0]}), "spec.conformance.door": frozenset({judge})}
        return Setting(f"{judge}({path}, config)", imports)

    def trial(self, target: Target, attempt: Callable[[], None]) -> None:
        """Try what is declared. Raises ``Failed``."""
        module, _, path = target.name.partition(":")
        attempt_name = "try_pool" if target.kind is Kind.POOL else "try_engine"
        imports = {module: frozenset({path.partition(".")[0]}), "spec.conformance.declared": frozenset({attempt_name})}
        try:
            attempt()
        except AdapterFault as fault:
            raise Failed(target.name, fault, None, (), Setting(f"{attempt_name}({path})", imports)) from fault

    # What pytest asks

    def pytest_report_header(self) -> list[str]:
        names = [f"{target.name} ({_name(target)})" for target in self.targets.values()]
        return [f"kvproof {_version()}: judging {', '.join(names + ([self.url] if self.url else [])) or 'nothing'}"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        ours = {_id(item): item for item in items if item.path.parent == FOLDER}
        for option, ids in (("skips", self.skips), ("xfails", self.xfails)):
            collected = {each.partition("::")[0] for each in ours}
            for unknown in sorted(ids - ours.keys()):
                file = unknown.partition("::")[0]
                if file in collected or not (FOLDER / file).is_file():
                    raise pytest.UsageError(f"--conformance-{option} names {unknown}, and there is no such test")
        for test_id, item in ours.items():
            if test_id in self.skips:
                item.add_marker(pytest.mark.skip(reason="named by --conformance-skips"))
            elif test_id in self.xfails:
                item.add_marker(pytest.mark.xfail(strict=True, reason="named by --conformance-xfails"))
        left_out = [item for item in ours.values() if self.levels and level_of(item) not in self.levels]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if item.path.parent != FOLDER or (report.when != "call" and report.passed):
            return report
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Incomplete):  # whatever an expected failure makes of it
            report.outcome, report.longrepr = "failed", f"{_id(item)} is incomplete: {error}"
            vars(report).pop("wasxfail", None)
        elif isinstance(error, Failed) and report.outcome == "failed":
            report.longrepr = str(error) + _causes(error.why)
        report.user_properties.append((PROPERTY, _outcome(item, report, error)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Told where the tests run, and where pytest-xdist gathers what its workers ran."""
        if (outcome := _carried(report)) is not None:
            self.outcomes[str(outcome["id"])] = outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        outcome = _carried(report)
        return ("incomplete", "I", "INCOMPLETE") if outcome and outcome["outcome"] == "incomplete" else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in terminalreporter.getreports("incomplete"):
            terminalreporter.write_line(f"INCOMPLETE {report.longrepr}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")
        if self.report_path is not None and not is_worker:
            self.report_path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")

    # The report

    def as_json(self) -> dict[str, object]:
        """The report: what was judged, how, and what came of each test."""
        return {
            "format": REPORT_FORMAT,
            "version": REPORT_VERSION,
            "kvproof": _version(),
            "python": platform.python_version(),
            "targets": [
                {"name": target.name, "kind": target.kind.name.lower(), "profile": profile_as_json(target.profile)}
                for target in self.targets.values()
            ],
            "url": self.url,
            "max_examples": self.max_examples,
            "time_budget_s": self.budget_s,
            "tests": list(self.outcomes.values()),
        }


def _carried(report: pytest.TestReport) -> dict[str, object] | None:
    """Our outcome in a report of pytest's; that of a collection carries none."""
    found = dict(getattr(report, "user_properties", ())).get(PROPERTY)
    return found if isinstance(found, dict) else None


def _outcome(item: pytest.Item, report: pytest.TestReport, error: BaseException | None) -> dict[str, object]:
    """What came of a test, as plain data."""
    outcome: str = report.outcome
    if isinstance(error, Incomplete):
        outcome = "incomplete"
    elif hasattr(report, "wasxfail"):
        outcome = "xfailed"
    elif outcome == "failed" and report.when != "call":
        outcome = "error"
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    found: dict[str, object] = {
        "id": _id(item),
        "level": level_of(item),
        "outcome": outcome,
        "reason": reason.removeprefix("Skipped: "),
        "duration_s": round(report.duration, 3),
    }
    if isinstance(error, Failed):
        found |= {"rule": error.rule, "method": error.method, "sentence": headline(error.why), "test": error.test}
    return found


def profile_as_json(profile: Profile | None) -> dict[str, object] | None:
    """A profile as plain data."""
    if profile is None:
        return None
    return {
        "name": profile.name,
        "capabilities": sorted(capability.value for capability in profile.capabilities),
        "admission_rules": [rule.value for rule in profile.admission_rules],
        **{name: each.value if isinstance(each, Enum) else each for name, each in asdict(profile.choices).items()},
    }


def _causes(why: Exception) -> str:
    """What an adapter raised, with its traceback."""
    cause = why.__cause__
    if cause is None:
        return ""
    return "\n\nThe adapter raised:\n\n" + "".join(traceback.format_exception(cause)).rstrip()


def level_of(item: pytest.Item) -> str:
    """The level of a test: its file is called after it."""
    found = re.match(r"test_(l\d|[a-z]+)", item.path.name)
    return found[1].upper() if found else ""


def _id(item: pytest.Item) -> str:
    """The id of a test, wherever the suite is installed."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def _name(target: Target) -> str:
    return f"{target.kind.value} called {target.profile.name}" if target.profile else target.kind.value


def _version() -> str:
    try:
        return version("kvproof")
    except PackageNotFoundError:
        return "of a checkout"


# Options as values


def _levels(text: str | None) -> frozenset[str]:
    levels = frozenset(each.strip().upper() for each in text.split(",")) if text else frozenset[str]()
    for unknown in sorted(levels - LEVELS.keys()):
        raise pytest.UsageError(f"--conformance-level is {text!r}: {unknown!r} is none of {', '.join(LEVELS)}")
    return levels


def _number(config: pytest.Config, name: str, *, whole: bool = False) -> float | None:
    text = config.getoption(name)
    if text is None:
        return None
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        kind = "a whole number" if whole else "a number of seconds"
        raise pytest.UsageError(f"--{name.replace('_', '-')} is {text!r}, it must be {kind} above 0")
    return number


def _url(text: str | None) -> str | None:
    if text is not None and not re.match(r"https?://[^/\s]+", text):
        raise pytest.UsageError(f"--conformance-url is {text!r}, it must be like http://host:port/v1")
    return text.rstrip("/") if text else None


def _path(config: pytest.Config, name: str) -> Path | None:
    text = config.getoption(name)
    return config.invocation_params.dir / text if text else None


def _ids(config: pytest.Config, name: str) -> frozenset[str]:
    """The ids in a file, one a line; what follows a # is a comment. Folders before the name of a file do not matter."""
    path = _path(config, name)
    if path is None:
        return frozenset()
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--{name.replace('_', '-')}: {path} cannot be read: {error}") from None
    return frozenset(re.sub(r"^[^:]*/", "", line) for line in lines if line)


def _targets(names: list[str], folder: Path) -> dict[Kind, Target]:
    targets: dict[Kind, Target] = {}
    for name in names:
        try:
            target = load(name, folder)
        except BadTarget as error:
            raise pytest.UsageError(str(error)) from None
        if target.kind in targets:
            raise pytest.UsageError(f"--engine names {target.kind.value} twice: {targets[target.kind].name} and {name}")
        targets[target.kind] = target
    return targets
