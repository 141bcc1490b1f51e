"""The other commands, and how all of them behave as processes."""

import importlib.metadata
import json
import signal
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimized.cli import app
from optimized.cli.screen import Screen, one_line, printable
from optimized.cli.traces import CLEAR, replay
from optimized.doctor import BASE, EXTRAS
from optimized.engine import SymbolicEngine
from spec.choices import Choices
from spec.engine import Capability
from spec.trace import Trace, dumps, load
from spec.vocabulary import Allocate, Config, Start
from tests.cli.conftest import ROOT, Process, Run

NOT_BUILT = ("simulate",)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A sequence of three tokens gets its two blocks; then block 0 is handed out a second time."""
    path = tmp_path / "log"
    events = (Start(0, (5, 6, 7)), Allocate(0, 3, (0, 1)), Start(1, (5,)), Allocate(1, 1, (0,)))
    path.write_text(dumps(Trace(Config(num_blocks=3, block_size=2), events, "mine")))
    return path


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_names_what_is_built_and_nothing_else(run: Run) -> None:
    shown = run("--help").stdout
    for command in ("generate", "chat", "serve", "plan", "bench", "doctor", "kernels", "spec", "trace"):
        assert command in shown
    for command in NOT_BUILT:
        assert f" {command} " not in shown
        assert run(command).exit_code == 2


def test_help_is_fast(process: Process) -> None:
    """Counted and not timed: what it imports is what it takes."""
    before = (
        "import atexit, sys\natexit.register(lambda: print(len(sys.modules), {'torch', 'numpy'} & sys.modules.keys()))"
    )
    out, _ = process("--help", before=before).communicate()
    num_modules, slow = out.splitlines()[-1].split(maxsplit=1)
    assert slow == "set()"
    assert int(num_modules) < 500


def test_the_version_is_that_of_the_distribution(run: Run) -> None:
    shown = run("--version").stdout
    assert shown.startswith("kvproof ")


# --- as a process -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_ends_without_a_traceback(process: Process, tiny_path: Path) -> None:
    # A step that takes its time.
    slow = "import time\nfrom optimized.model_core import TorchCore\nstep = TorchCore.step\n"
    slow += "TorchCore.step = lambda core: (time.sleep(0.1), step(core))[1]"
    child = process("generate", "a", "b", "--model", tiny_path, "--max-tokens", 50, "--temperature", 1, before=slow)
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == "=== a\n"
    child.send_signal(signal.SIGINT)
    assert child.wait() == 130
    assert [line.partition(" KV cache ")[0] for line in child.stderr] == ["tiny.gguf: a"]


def test_a_reader_who_goes_away_is_no_error(process: Process, log: Path) -> None:
    # The child begins when there is no reader any more.
    child = process("trace", "replay", log, before="import select\nmy = select.poll()\nmy.register(1, 0)\nmy.poll()")
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.wait() == 141
    assert child.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("torch", ("generate", "a"), "engine"),
        ("minijinja", ("generate", "a"), "engine"),
        ("z3", ("spec", "prove"), "formal"),
    ],
)
def test_a_missing_package_names_its_extra(
    process: Process, tiny_path: Path, module: str, arguments: tuple[str, ...], extra: str
) -> None:
    model = ("--model", tiny_path) if arguments[0] == "generate" else ()
    child = process(*arguments, *model, before=f"import sys\nsys.modules[{module!r}] = None")
    out, error = child.communicate()
    assert (child.returncode, out) == (2, "")
    assert error.startswith("this needs ")
    assert error.endswith(f"which is not installed: pip install 'kvproof[{extra}]'\n")


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_says_which_device_and_why(run: Run) -> None:
    result = run("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == len(found["problems"]) > 0 or result.exit_code == 0
    assert found["installed"]["torch"] == importlib.metadata.version("torch")
    assert found["device"] in ("cpu", "cuda")
    assert found["device_reason"]
    assert found["num_threads"] >= 1
    assert found["environment"]["KVPROOF_HOME"] == found["model_folder"]
    text = run("doctor").stdout
    assert "in int8" in found["int8_weights"]
    assert "4 bits" in found["gguf_weights"]
    for fact in (
        found["device_reason"],
        found["kernels"],
        found["int8_weights"],
        found["gguf_weights"],
        found["model_folder"],
        found["default_model"],
    ):
        assert fact in text


def test_doctor_shows_who_is_admitted_and_who_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_WATERMARK_BLOCKS", "7")
    settings = json.loads(run("doctor", "--json", "--", "--admission-rule", "no_evict").stdout)["settings"]
    found = {each["name"]: (each["value"], each["origin"]) for each in settings}
    assert found["admission-rule"] == ("no_evict", "command line")
    assert found["watermark-blocks"] == ("7", "environment")


def test_doctor_finds_the_other_package_of_that_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's ``kernels`` and ours would overwrite each other's files."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"kernels": ["kvproof", "kernels"]})
    result = run("doctor")
    assert result.exit_code == 1
    assert "PROBLEM" in result.stdout
    assert "keep the two in different environments" in result.stdout


def test_doctor_reports_kernels_that_cannot_be_had(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_CPU_KERNELS", "fast")
    result = run("doctor")
    assert result.exit_code == 1
    assert "PROBLEM     KVPROOF_CPU_KERNELS is 'fast', it must be one of auto, vector, torch" in result.stdout


def test_doctor_knows_what_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {
        extra: [each.split(">=")[0] for each in listed] for extra, listed in project["optional-dependencies"].items()
    }
    assert list(BASE) == [each.split(">=")[0] for each in project["dependencies"]]
    for extra, listed in EXTRAS.items():
        assert list(listed) == names[extra]


# --- spec, trace, kernels -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rules_are_listed_with_their_sentences(run: Run) -> None:
    found = {rule["id"]: rule for rule in json.loads(run("spec", "rules", "--json").stdout)["rules"]}
    assert found["ALLOC-2"]["sentence"] == "A block's reference count is the number of its holders."
    assert found["ALLOC-2"]["kind"] == "state"
    assert found["ALLOC-4"]["events"] == ["Allocate", "Copy", "SwapIn"]
    lines = run("spec", "rules").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(found)


def test_explore_visits_a_small_scope(run: Run) -> None:
    options = ("--num-blocks", 2, "--max-seqs", 2, "--max-tokens", 2, "--prefix-cache")
    found = json.loads(run("spec", "explore", *options, "--json").stdout)
    assert found["num_states"] > 10
    assert (found["broken"], found["path"]) == ([], [])
    assert "publish" in found["scope"]["operations"]
    assert f"{found['num_states']:,} states" in run("spec", "explore", *options).stdout


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--num-blocks", 2, "--lens", "cache"), "lens"),
        (("--num-blocks", 2, "--scope", "large"), "scope"),
        (("--lens", "fork", "--max-tokens", 3), "max_tokens"),
        (("--prefix-cache",), "prefix_cache"),
    ],
)
def test_an_option_that_nobody_would_look_at_is_refused(run: Run, options: tuple[object, ...], name: str) -> None:
    result = run("spec", "explore", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{name} is ") and ", it must be left out with" in result.stderr


def without_swap(config: Config) -> SymbolicEngine:
    class Plainer(SymbolicEngine):
        profile = replace(SymbolicEngine.profile, capabilities=SymbolicEngine.profile.capabilities - {Capability.SWAP})

    return Plainer(config)


def test_reach_asks_what_a_profile_can_reach(run: Run) -> None:
    options = ("--num-blocks", 2, "--max-seqs", 1, "--max-tokens", 2, "--num-host-blocks", 2, "--reach", "swapped")
    for engine, reached in (("optimized:make_engine", True), (f"{__name__}:without_swap", False)):
        found = json.loads(run("spec", "explore", *options, "--engine", engine, "--json").stdout)
        assert found["reached"] is reached
    assert "swap_out(0)" in json.loads(run("spec", "explore", *options, "--json").stdout)["path"]
    result = run("spec", "explore", *options, "--engine", "nobody:knows")
    assert (result.exit_code, "it must be a factory of engines or pools" in result.stderr) == (2, True)
    assert run("spec", "explore", "--engine", "optimized:make_engine").exit_code == 2


def test_check_names_the_rule_and_the_line(run: Run, log: Path) -> None:
    result = run("trace", "check", log)
    assert result.exit_code == 1
    assert result.stderr.startswith("ALLOC-")
    assert f"This is event 4 of {log}, on line 5." in result.stderr
    found = json.loads(run("trace", "check", log, "--json").stdout)
    assert (found["engine"], found["num_events"]) == ("mine", 4)
    assert result.stderr.startswith(found["broken"])


def test_replay_follows_without_judging(run: Run, log: Path) -> None:
    result = run("trace", "replay", log)
    assert result.exit_code == 0
    assert "Allocate(seq=0, num_tokens=3, blocks=(0, 1))" in result.stdout
    assert json.loads(run("trace", "replay", log, "--json").stdout)["block_tables"] == {"0": [0, 1], "1": [0]}


def test_replay_shows_a_part_and_where_it_leads(run: Run, log: Path) -> None:
    shown = run("trace", "replay", log, "--from", 2, "--to", 2).stdout.splitlines()
    assert shown[0].split(maxsplit=1) == ["2", "Allocate(seq=0, num_tokens=3, blocks=(0, 1))"]
    assert shown[2].split() == ["block", "0", "x1", "1", "x1", "2"]
    assert shown[-1] == "mine: 2 events lead to 1 of 3 blocks free, 0 requests that run and 0 that wait"


def test_replay_steps_through_a_terminal(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is none that is typed into, since what is typed before it listens is lost."""
    keys = iter("npnn x nnpq")
    monkeypatch.setattr("typer.getchar", lambda: next(keys))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    replay(log)
    screens = capsys.readouterr().out.split(CLEAR)[1:]
    assert [int(screen.split()[1]) for screen in screens] == [0, 1, 0, 1, 2, 3, 3, 4, 4, 4, 3]
    assert screens[1].startswith("event 1 of 4: Start seq 0, tokens 5 6 7\n")
    assert "seq 0   5 6 7   computed 0 of 3   table none" in screens[1]
    assert screens[-1].endswith("n: next   p: previous   q: quit\n")


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_render_draws_one_whole_file(run: Run, log: Path, tmp_path: Path, ending: str) -> None:
    output = tmp_path / f"out.{ending}"
    result = run("trace", "render", log, "-o", output)
    assert result.stdout == f"{output}: 4 steps of 0 requests, 4 maps\n"
    assert "Allocate seq 1, num_tokens 1, blocks 0" in output.read_text()
    assert list(tmp_path.glob("*.part")) == []
    result = run("trace", "render", log, "-o", tmp_path / "out.png")
    assert (result.exit_code, "must be a file whose name ends in .html or .svg" in result.stderr) == (2, True)


def test_shrink_leaves_what_breaks_the_rule(run: Run, log: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    assert run("trace", "shrink", log, "-o", small).stdout == f"{small}: 4 of 4 events break ALLOC-4\n"
    assert run("trace", "check", small).stderr.startswith("ALLOC-4 ")
    assert load(small).config.num_blocks == 2
    assert run("trace", "shrink", small, "-o", tmp_path / "a").exit_code == 0
    log.write_text(dumps(Trace(Config(num_blocks=3))))
    result = run("trace", "shrink", log, "-o", small)
    assert (result.exit_code, result.stderr) == (1, f"{log}: every rule holds, so there is nothing to shrink\n")


def test_the_choices_of_a_log_are_those_of_its_engine(
    run: Run, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block 0 is kept by the engine: it is neither free nor handed out."""
    choices = Choices(num_reserved_blocks=1)
    log.write_text(dumps(Trace(Config(num_blocks=3), (Start(0, (5,)), Allocate(0, 1, (1,))), "mine", choices)))
    result = run("trace", "shrink", log, "-o", tmp_path / "small")
    assert (result.exit_code, result.stderr) == (1, f"{log}: every rule holds, so there is nothing to shrink\n")
    log.write_text(dumps(Trace(Config(num_blocks=3), (Start(0, (5,)), Allocate(0, 1, (0,))), "mine", choices)))
    assert run("trace", "shrink", log, "-o", tmp_path / "small").exit_code == 0
    assert load(tmp_path / "small").choices == choices
    keys = iter("nnq")
    monkeypatch.setattr("typer.getchar", lambda: next(keys))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    replay(log)
    assert next(line.split() for line in capsys.readouterr().out.splitlines() if "free" in line) == [
        "seqs",
        "free",
        "free",
    ]


def test_a_log_that_is_none_is_refused_with_its_line(run: Run, log: Path) -> None:
    log.write_text("hello\n")
    for command in ("check", "replay"):
        result = run("trace", command, log)
        assert (result.exit_code, result.stderr) == (2, f"{log}, line 1: this is no JSON object\n")


def test_a_log_that_is_not_there_is_one_sentence(run: Run, tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no", "No such file or directory"), (tmp_path, "Is a directory")):
        for command in (
            ("check",),
            ("replay",),
            ("render", "-o", tmp_path / "a.svg"),
            ("shrink", "-o", tmp_path / "a"),
        ):
            result = run("trace", command[0], path, *command[1:])
            assert (result.exit_code, result.stderr) == (2, f"{path}: {why}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_is_cut_off_says_how_far_it_holds(run: Run, log: Path) -> None:
    log.write_text("\n".join(log.read_text().splitlines()[:4]) + '\n{"event": "All')
    for how in ((), ("--full",)):
        result = run("trace", "check", log, *how)
        assert result.exit_code == 2
        first, second = result.stderr.splitlines()
        assert first == f"{log}, line 5: the log is cut off"
        assert second.startswith("The 3 events before it break none of the ")


def test_a_pool_that_nobody_can_have_is_refused(run: Run, log: Path) -> None:
    log.write_text(log.read_text().replace('"num_blocks": 3', '"num_blocks": 1000000000000'))
    for command in ("check", "replay"):
        result = run("trace", command, log)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"{log}, line 1: the field 'config.num_blocks' is 1000000000000, ")


def test_a_file_of_kv_events_is_known_and_judged(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5], "block_size": 1}
    path.write_text(json.dumps(event) + "\n")
    assert "1 KV events: those rules hold that such a stream can break" in run("trace", "check", path).stdout
    path.write_text(path.read_text() + '{"type": "BlockRemoved", "block_hashes": [2]}\n')
    result = run("trace", "check", path)
    assert (result.exit_code, result.stderr.split()[0]) == (1, "CACHE-9")
    assert f"This is event 2 of {path}, on line 2." in result.stderr
    found = json.loads(run("trace", "check", path, "--json").stdout)
    assert (found["broken"], found["line"]) == ("CACHE-9", 2)


def test_kernels_lists_every_target(run: Run) -> None:
    found = json.loads(run("kernels", "--json").stdout)["configurations"]
    assert {each["target"] for each in found} == {"sm_80", "sm_90", "sm_100", "gfx942"}


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_a_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\n") == "a\\x1b[2Jb\\x07\tc\n"
    assert one_line("two\nlines") == "two lines"


def test_nothing_is_empty_before_something_came() -> None:
    assert Screen(["a"], 1).is_empty


def test_bench_scheduler_answers_in_json_and_refuses_a_pool_that_is_too_small(run: Run) -> None:
    facts = json.loads(run("bench", "scheduler", "--requests", "3", "--num-blocks", "512", "--json").stdout)
    assert facts["engine"] == "kvproof-scheduler"
    result = run("bench", "scheduler", "--num-blocks", "1")
    assert (result.exit_code, result.stderr) == (2, "num_blocks is 1, it must be from 512 to 100000000\n")


def test_a_chat_remembers_what_was_said(tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path))
    asked = ["chat", str(tiny_path), "--max-tokens", "2", "--temperature", "0", "--blocks"]
    result = CliRunner().invoke(app, asked, input="a\nb\n")
    assert result.exit_code == 0
    said = [line for line in result.stderr.splitlines() if "found in the cache" in line]
    assert len(said) == 2
    assert said[0].startswith("[0 tokens")
    nothing = CliRunner().invoke(app, ["chat", str(tiny_path)], input="\n")
    assert (nothing.exit_code, nothing.stdout) == (0, "")


def test_a_workload_is_served_and_counted(run: Run, tiny_path: Path, tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text('{"prompt_token_ids": [1, 2, 3], "max_tokens": 4}\n')
    facts = json.loads(run("bench", "offline", load, "--model", tiny_path, "--json").stdout)
    assert (facts["tokens_in"], facts["tokens_out"]) == (3, 4)


def test_how_many_prompts_are_computed_in_parts_is_a_number_from_one_on(run: Run) -> None:
    for command in (("generate", "hello"), ("serve",)):
        result = run(*command, "--max-num-partial-prefills", "0")
        assert result.exit_code == 2
        assert result.stderr.startswith("max_num_partial_prefills is 0, it must be a whole number, at least 1")
