"""Level L5 lets a correct server pass, and catches each sabotaged one by the statement that is named beside it."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from spec.conformance.served import (
    PROMPTS,
    ServedViolation,
    difference,
    judge_answer,
    judge_batch,
    judge_ids,
    judge_leavers,
    judge_refusals,
    judge_samples,
    judge_seed,
    judge_stop,
    judge_stream,
    judge_warm,
)
from spec.conformance.served_client import Choice, NotOffered, Server, ServerFault, TokenLogprobs
from tests.conformance import fake_server

ROOT = Path(__file__).parents[2]
SOURCE = Path(fake_server.__file__).read_text()
JUDGES = {
    "answer": lambda server: judge_answer(server, PROMPTS[0]),
    "ids": lambda server: judge_ids(server, [5, 6, 7]),
    "stream": lambda server: judge_stream(server, PROMPTS[0]),
    "warm": lambda server: judge_warm(server, PROMPTS[0]),
    "samples": lambda server: judge_samples(server, PROMPTS[0]),
    "seed": lambda server: judge_seed(server, PROMPTS[0]),
    "stop": lambda server: judge_stop(server, PROMPTS[0]),
    "batch": lambda server: judge_batch(server, PROMPTS),
    "leavers": lambda server: judge_leavers(server, PROMPTS),
    "refusals": lambda server: judge_refusals(server, PROMPTS[0]),
}


@dataclass(frozen=True)
class Sabotage:
    """The fake server with ``old``, which is there once, replaced by ``new``; the statement and the judge that catch it."""

    name: str
    statements: str  # or one of two, where it depends on who comes first
    judge: str
    old: str
    new: str


SABOTAGES = [
    Sabotage(
        "prompt counted for each answer",
        "X6",
        "samples",
        '"prompt_tokens": len(tokens),',
        '"prompt_tokens": len(tokens) * ask.get("n", 1),',
    ),
    Sabotage(
        "one prompt token too many", "X6", "ids", '"prompt_tokens": len(tokens),', '"prompt_tokens": len(tokens) + 1,'
    ),
    Sabotage(
        "cached prompt not counted",
        "X6",
        "warm",
        '"prompt_tokens": len(tokens),',
        '"prompt_tokens": len(tokens) // CACHE[repr(prompt)],',
    ),
    Sabotage("a total that is no sum", "X6", "answer", "len(tokens) + used}", "len(tokens)}"),
    Sabotage(
        "stream without [DONE]", "X4", "stream", '[*map(json.dumps, chunks), "[DONE]"]', "[*map(json.dumps, chunks)]"
    ),
    Sabotage(
        "stream misses a piece",
        "X4",
        "stream",
        '[{"choices": [chunk]} for chunk in chunks]',
        '[{"choices": [chunk]} for chunk in chunks[1:]]',
    ),
    Sabotage(
        "stop string shown",
        "X3",
        "stop",
        "settled = text[: min(ends, default=len(text) - held)]",
        "settled = text if ends else text[: len(text) - held]",
    ),
    Sabotage("beginning of a stop string shown", "X3", "stop", "default=len(text) - held)]", "default=len(text))]"),
    Sabotage(
        "stop looked for at the end only",
        "X3",
        "stop",
        "(at := text.find(stop)) >= 0",
        "text.endswith(stop) and (at := text.find(stop)) >= 0",
    ),
    Sabotage("siblings draw alike", "X7", "samples", "{index} {position}", "{position}"),
    Sabotage("seed ignored", "X7", "seed", "{ask.get('seed')} {index}", "{index}"),
    Sabotage(
        "seed of the second time",
        "X7",
        "seed",
        "{ask.get('seed')} {index}",
        "{ask.get('seed')} {sum(CACHE.values())} {index}",
    ),
    Sabotage(
        "a warm cache differs",
        "X9",
        "warm",
        "logs = logprobs_after(tokens)",
        "logs = logprobs_after(tokens if max(CACHE.values()) < 4 else tokens[1:])",
    ),
    Sabotage(
        "neighbours mix",
        "X12",
        "batch",
        "chunks, used = [], 0",
        # A prompt that comes again comes with neighbours, and waits for one of them; they are counted here, since a process
        # has other threads.
        "crowd = STATE.setdefault('crowd', []); crowd += [prompt] if CACHE[repr(prompt)] > 1 else [];"
        " [threading.Event().wait(0.01) for _ in range(900) if len(crowd) == 1];"
        " tokens = tokens[::-1] if crowd else tokens; chunks, used = [], 0",
    ),
    Sabotage(
        "an abort changes others",
        "X8 X12",
        "leavers",
        "logs = logprobs_after(tokens)",
        'logs = logprobs_after(tokens if STATE["left"] < 1 else tokens[1:])',
    ),
    Sabotage("tokens that are not the text's", "X5", "answer", '"tokens": [word]', '"tokens": [word.strip()]'),
    Sabotage(
        "log-probabilities after the temperature",
        "X11",
        "answer",
        '"token_logprobs": [logs[word]]',
        '"token_logprobs": [-logs[word]]',
    ),
    Sabotage("not the likeliest", "X9", "answer", "word = max(logs, key=logs.get)", "word = min(logs, key=logs.get)"),
    Sabotage("temperature unchecked", "X2", "refusals", '"temperature": (0, 100), ', ""),
]


@pytest.fixture
def serve():
    stops = []

    def started(module) -> Server:
        url, stop = module.start()
        stops.append(stop)
        return Server(url, timeout_s=10)

    yield started
    for stop in stops:
        stop()


def sabotaged(sabotage: Sabotage, folder: Path):
    assert SOURCE.count(sabotage.old) == 1
    path = folder / "sabotaged_server.py"
    path.write_text(SOURCE.replace(sabotage.old, sabotage.new))
    made = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("sabotaged_server", path))
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", JUDGES)
def test_a_correct_server_passes(name, serve):
    JUDGES[name](serve(fake_server))


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda each: each.name)
def test_a_sabotaged_server_is_caught(sabotage, serve, tmp_path):
    with pytest.raises(ServedViolation) as caught:
        JUDGES[sabotage.judge](serve(sabotaged(sabotage, tmp_path)))
    assert caught.value.statement in sabotage.statements, caught.value


def test_a_report_shows_how_to_see_it_again(serve, tmp_path):
    """What it says to paste raises the same violation."""
    server = serve(sabotaged(SABOTAGES[0], tmp_path))
    with pytest.raises(ServedViolation) as caught:
        judge_samples(server, PROMPTS[0])
    report = str(caught.value)
    assert report.startswith("X6 does not hold: Prompt tokens are counted once, ")
    assert "part of   SAMPLE-2: A sequence is given the token that was drawn for it." in report
    assert "15 prompt tokens, alone they are 5" in report
    pasted: dict[str, object] = {}
    exec(report[report.index("from spec.conformance") :], pasted)  # noqa: S102  the report is ours
    with pytest.raises(ServedViolation) as again:
        pasted["test_x6_again"](server.url)
    assert str(again.value) == report


def choice(*tokens: TokenLogprobs) -> Choice:
    text = "".join(each.token for each in tokens)
    return Choice(text, (text,), ("length",), tokens)


def test_a_greedy_difference_is_explained_where_two_tokens_were_as_good_as_equally_likely():
    near, far = {"a": -1.0, "b": -1.01}, {"a": -1.0, "b": -2.0}
    first = TokenLogprobs("x", -0.5, {"x": -0.5, "y": -3.0})
    for top, explained in ((near, True), (far, False)):
        one = choice(first, TokenLogprobs("a", top["a"], top))
        other = choice(first, TokenLogprobs("b", top["b"], top), first)
        assert (difference(one, other) is None) == explained
    assert difference(choice(first), choice(first)) is None
    moved = TokenLogprobs("x", -0.7, first.top)
    assert "has log-probability -0.7000, alone it has -0.5000" in difference(choice(first), choice(moved))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('{"data": [{"id": "fake"}]}', '{"data": []}', "names no model"),
        ('"text": text, "logprobs": joined', '"words": text, "logprobs": joined', "lacks what a completion has"),
        ("data = json.dumps(body).encode()", 'data = b"<html>"', "this is no JSON"),
        ("tokens = re.findall", "1 / 0\n        tokens = re.findall", "does not answer"),
    ],
)
def test_a_server_that_gives_no_answer_breaks_no_rule(old, new, words, serve, tmp_path, capsys):
    server = serve(sabotaged(Sabotage("", "", "", old, new), tmp_path))
    with pytest.raises(ServerFault, match=words):
        judge_answer(server, PROMPTS[0])
    capsys.readouterr()  # the server's own traceback


def test_nobody_at_home_is_no_broken_rule():
    with pytest.raises(ServerFault, match="does not answer: ConnectionRefusedError"):
        judge_answer(Server("http://127.0.0.1:9/v1"), PROMPTS[0])


def test_what_a_server_does_not_have_is_not_judged(serve, tmp_path):
    made = sabotaged(Sabotage("", "", "", '"n": (1, 128)', '"n": (1, 1)'), tmp_path)
    with pytest.raises(NotOffered, match="n is 3, it must be from 1 to 1"):
        judge_samples(serve(made), PROMPTS[0])


def test_a_server_without_log_probabilities_is_judged_by_its_text(serve, tmp_path):
    made = sabotaged(Sabotage("", "", "", '"top_p": (0, 1)', '"top_p": (0, 1), "logprobs": (0, 0)'), tmp_path)
    server = serve(made)
    assert not server.has_logprobs
    for judge in JUDGES.values():
        judge(server)


@pytest.mark.slow
def test_a_server_is_judged_from_the_command_line(serve, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "spec.conformance.plugin", "-p", "no:cacheprovider"]
    where = [ROOT / "spec/conformance/test_l5_served.py", "--rootdir", tmp_path, "-c", os.devnull]
    done = subprocess.run(
        [*command, *where, "--conformance-url", serve(fake_server).url],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 passed" in done.stdout
