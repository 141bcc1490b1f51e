"""Level SECURITY lets a server pass that takes nothing it does not know, and catches one with a weakness by its name."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from spec.conformance import security
from spec.conformance.attacker import Attacked
from spec.conformance.poisons import DEADLY, GRAMMARS, GREEDY
from spec.conformance.security import CHAT, COMPLETIONS, DISGUISES, TOO_MUCH, SecurityViolation
from spec.conformance.served_client import NotOffered
from spec.conformance.weaknesses import UNSEEN, WEAKNESSES
from tests.conformance import attacked_server

SOURCE = Path(attacked_server.__file__).read_text()
KEYS = ["one-key", "two-keys"]
ASK = "        wrong = [name"
TAKE = "name not in FIELDS or not FIELDS[name](value)]"


@dataclass(frozen=True)
class Sabotage:
    """The server with ``old``, which is there once, replaced by ``new``; the weakness and the attack that finds it."""

    name: str
    weakness: str
    attack: Callable[[Attacked], None]
    old: str
    new: str
    patience_s: float = 10.0
    """For how long the attack waits for an answer; less where there is none, but as long as a busy machine may take."""


def poison(weakness: str, fields: dict[str, object], path: str = COMPLETIONS) -> Callable[[Attacked], None]:
    return lambda server: security.judge_poison(server, weakness, path, fields)


def deadly(what: str) -> Callable[[Attacked], None]:
    return poison("deadly-request", dict(DEADLY[what][1]))


def greedy(what: str) -> Callable[[Attacked], None]:
    return lambda server: security.judge_greed(server, COMPLETIONS, GREEDY[what][1])


def much(what: str) -> Callable[[Attacked], None]:
    return lambda server: security.judge_bytes(server, what)


def disguised(name: str) -> Callable[[Attacked], None]:
    return lambda server: security.judge_disguise(server, name)


def regex(what: str) -> Callable[[Attacked], None]:
    return poison("grammar", dict(GRAMMARS[what][1]))


def masked(name: str) -> Callable[[Attacked], None]:
    return lambda server: security.judge_masks(server, name)


NO_JSON = "        except (ValueError, RecursionError):"
SABOTAGES = [
    Sabotage(
        "a body is unpickled",
        "deserialization",
        partial(security.judge_objects, path=COMPLETIONS),
        NO_JSON,
        "        except ValueError:\n            __import__('contextlib').suppress(Exception)\n"
        "            try:\n                __import__('pickle').loads(data)\n            except Exception:\n                pass\n"
        '            return self.say(400, {"error": "this is no JSON"})\n' + NO_JSON,
    ),
    Sabotage(
        "a logit processor is unpickled",
        "deserialization",
        partial(security.judge_objects, path=COMPLETIONS),
        ASK,
        '        if "custom_logit_processor" in ask:\n            found = json.loads(ask["custom_logit_processor"])["callable"]\n'
        "            __import__('pickle').loads(bytes.fromhex(found))\n" + ASK,
    ),
    Sabotage(
        "a template is evaluated",
        "code",
        security.judge_template,
        'or path != "/v1/completions":\n            return self.say(404, {})',
        'or "v1" not in path:\n            return self.say(404, {})\n        if b"chat_template" in data:\n            try:\n'
        '                eval(json.loads(data)["chat_template"].strip("{ }"))\n            except Exception:\n                pass',
    ),
    Sabotage(
        "only some routes are guarded",
        "open-route",
        security.judge_routes,
        "path not in OPEN:",
        'path.startswith("/v1"):',
    ),
    Sabotage(
        "the path is made from the host",
        "open-route",
        disguised("a path in the host"),
        "path not in OPEN:",
        "__import__('urllib.parse').parse.urlsplit(f\"http://{self.headers['Host']}{self.path}\").path not in OPEN:",
    ),
    Sabotage(
        "a proxy's header is believed",
        "open-route",
        disguised("original url"),
        "path not in OPEN:",
        'path not in OPEN and self.headers["X-Original-URL"] not in OPEN:',
    ),
    Sabotage(
        "what begins openly is open",
        "open-route",
        security.judge_detours,
        "if key is None and path not in OPEN:",
        "raw, path = path, __import__('posixpath').normpath(path)\n        if key is None and not raw.startswith('/health'):",
    ),
    Sabotage(
        "keys are compared as far as they go",
        "wrong-key",
        security.judge_wrong_keys,
        "(each, given)",
        "(each[: len(given)], given)",
    ),
    Sabotage(
        "there is a default key", "wrong-key", security.judge_wrong_keys, '[b"one-key", ', '[b"one-key", b"EMPTY", '
    ),
    Sabotage(
        "keys are compared as texts",
        "wrong-key",
        security.judge_wrong_keys,
        "path = self.path",
        'hmac.compare_digest(self.headers["Authorization"] or "", "Bearer x")\n        path = self.path',
    ),
    Sabotage(
        "any number of answers", "exhaustion", greedy("a hundred thousand answers"), "whole(1, 4)", "whole(1, 1 << 20)"
    ),
    Sabotage(
        "any number of prompts",
        "exhaustion",
        greedy("100,000 prompts"),
        "isinstance(value, str) and 0 < len(value) < 5000",
        "0 < len(value)",
    ),
    Sabotage(
        "any number of tokens",
        "exhaustion",
        greedy("more tokens than there is room"),
        "whole(1, 64)",
        "lambda value: True",
        patience_s=1.5,
    ),
    Sabotage("any length", "exhaustion", much("a body of 64 MiB"), "1 << 20:", "1 << 40:"),
    Sabotage(
        "any depth", "exhaustion", much("100,000 brackets inside each other"), NO_JSON, "        except ValueError:"
    ),
    Sabotage(
        "any time", "exhaustion", much("a head that never ends"), '"HTTP/1.1", 1', '"HTTP/1.1", None', patience_s=1.5
    ),
    Sabotage(
        "any number of headers",
        "exhaustion",
        much("10,000 headers"),
        "import threading\n",
        "import threading\nimport http.client\n\nhttp.client._MAXHEADERS = 1 << 20\n",
    ),
    Sabotage(
        "any header",
        "exhaustion",
        much("a header of 1 MiB"),
        "import threading\n",
        "import threading\nimport http.client\n\nhttp.client._MAXLINE = 1 << 24\n",
    ),
    Sabotage(
        "an expression tries for ever",
        "grammar",
        regex("an expression that tries for ever"),
        ASK,
        '        if "regex" in ask:\n            __import__("time").sleep(5)\n' + ASK,
        patience_s=1.5,
    ),
    Sabotage(
        "a grammar's error ends the engine",
        "grammar",
        regex("an empty grammar"),
        ASK,
        '        STATE["dead"] |= ask.get("grammar") == ""\n' + ASK,
    ),
    Sabotage(
        "methods are labels",
        "label",
        security.judge_labels,
        "    do_GET = do_POST = respond\n",
        "    do_GET = do_POST = respond\n\n    def __getattr__(self, name):\n        COUNTS[name] = 1\n        raise AttributeError(name)\n",
    ),
    Sabotage(
        "an image is fetched",
        "foreign-address",
        partial(security.judge_addresses, kind="image_url"),
        'or path != "/v1/completions":\n            return self.say(404, {})',
        'or "v1" not in path:\n            return self.say(404, {})\n        if b"image_url" in data:\n'
        '            place = json.loads(data)["messages"][0]["content"][1]["image_url"]["url"]\n            try:\n'
        "                __import__('urllib.request').request.urlopen(place, timeout=1)\n            except Exception:\n                pass",
    ),
    Sabotage(
        "a file is read",
        "foreign-address",
        partial(security.judge_addresses, kind="image_url"),
        'or path != "/v1/completions":\n            return self.say(404, {})',
        'or "v1" not in path:\n            return self.say(404, {})\n        if b"file:///etc/passwd" in data:\n'
        '            return self.say(400, b"root:x:0:0")',
    ),
    Sabotage(
        "a stop token outside ends the engine",
        "deadly-request",
        deadly("a stop token outside"),
        ASK,
        '        STATE["dead"] |= "stop_token_ids" in ask\n' + ASK,
    ),
    Sabotage(
        "an empty prompt ends a thread",
        "deadly-request",
        deadly("an empty prompt"),
        "0 < len(value) < 5000",
        "(len(value) > 0 or STATE.update(dead=True) is None)",
    ),
    Sabotage(
        "a number is not looked at",
        "deadly-request",
        deadly("an infinite temperature"),
        "0 <= value <= 2",
        "(0 <= value <= 2 or 1 / 0)",
    ),
    Sabotage(
        "a mask stays in its place",
        "neighbour",
        masked("allowed tokens"),
        ASK,
        '        STATE["mask"] = [" no"] if "allowed_token_ids" in ask else STATE["mask"]\n' + ASK,
    ),
    Sabotage(
        "answers are kept by a caller's id",
        "neighbour",
        security.judge_ids,
        'text = answer(ask["prompt"], ask.get("max_tokens", 16), STATE["mask"])',
        'text = answer(ask["prompt"], ask.get("max_tokens", 16), STATE["mask"])\n'
        '        text = RESULTS.setdefault(self.headers["X-Request-Id"] or ask["prompt"], text)',
    ),
    Sabotage(
        "an abort by the beginning of an id",
        "neighbour",
        security.judge_leaving,
        'text = answer(ask["prompt"], ask.get("max_tokens", 16), STATE["mask"])',
        'STATE["left"] += "stream" in ask\n        text = answer(ask["prompt"], 1 if STATE["left"] else ask.get("max_tokens", 16), STATE["mask"])',
    ),
    Sabotage(
        "one cache for all keys",
        "shared-cache",
        security.judge_shared_cache,
        '(key, ask["prompt"]) in CACHE',
        'any(p == ask["prompt"] for _, p in CACHE)',
    ),
    Sabotage("an address in an error", "leak", security.judge_errors, '"this is no JSON"', 'f"{object()}"'),
    Sabotage(
        "a traceback in an error",
        "leak",
        security.judge_errors,
        '"this is no JSON"',
        '"Traceback (most recent call last): File"',
    ),
]


@pytest.fixture
def serve() -> Iterator[Callable[..., Attacked]]:
    stops = []

    def started(module: ModuleType, keys: list[str] = KEYS, patience_s: float = 10.0) -> Attacked:
        url, stop = module.start()
        stops.append(stop)
        return Attacked(url, keys, patience_s=patience_s)

    yield started
    for stop in stops:
        stop()


def sabotaged(old: str, new: str, folder: Path) -> ModuleType:
    assert SOURCE.count(old) == 1, old
    path = folder / "sabotaged_server.py"
    path.write_text(SOURCE.replace(old, new))
    spec = importlib.util.spec_from_file_location("sabotaged_server", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.slow
def test_a_server_that_takes_nothing_unknown_passes(serve: Callable[..., Attacked]) -> None:
    server = serve(attacked_server)
    for sabotage in SABOTAGES:
        sabotage.attack(server)
    for name in DISGUISES:
        security.judge_disguise(server, name)
    for what in TOO_MUCH:
        security.judge_bytes(server, what)


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda each: each.name)
def test_a_weakness_is_found_by_its_name(
    sabotage: Sabotage, serve: Callable[..., Attacked], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SecurityViolation) as caught:
        sabotage.attack(serve(sabotaged(sabotage.old, sabotage.new, tmp_path), patience_s=sabotage.patience_s))
    assert caught.value.weakness == sabotage.weakness, caught.value
    capsys.readouterr()  # the server's own tracebacks


def test_every_weakness_has_a_sabotaged_server() -> None:
    assert {sabotage.weakness for sabotage in SABOTAGES} == set(WEAKNESSES)


def test_a_report_names_advisories_and_how_to_see_it_again(serve: Callable[..., Attacked], tmp_path: Path) -> None:
    server = serve(sabotaged('"this is no JSON"', 'f"{object()}"', tmp_path))
    with pytest.raises(SecurityViolation) as caught:
        security.judge_errors(server)
    report = str(caught.value)
    assert report.startswith("leak does not hold: An error says what was wrong with the request")
    assert "CVE-2026-54236" in report
    pasted: dict[str, Callable[[str], None]] = {}
    exec(report[report.index("from spec.conformance") :], pasted)  # noqa: S102  the report is ours
    with pytest.raises(SecurityViolation):
        pasted["test_leak_again"](server.url)


def test_without_keys_what_needs_them_is_not_judged(serve: Callable[..., Attacked], tmp_path: Path) -> None:
    server = serve(sabotaged("path not in OPEN:", "False:", tmp_path), keys=[])
    for judge in (security.judge_routes, security.judge_wrong_keys, security.judge_shared_cache):
        with pytest.raises(NotOffered, match="keys of the server"):
            judge(server)
    security.judge_errors(server)
    assert server.post(CHAT, {}).is_refusal


def test_the_page_has_every_class_and_every_advisory() -> None:
    page = (Path(__file__).parents[2] / "docs" / "attack-a-server.md").read_text(encoding="utf-8")
    for name, weakness in WEAKNESSES.items():
        line = f"| `{name}` | {weakness.sentence} | {', '.join(weakness.advisories)} |"
        assert line in page, line
    for what, why in UNSEEN.items():
        assert f"| {what} | {why} |" in page, what
    advisories = {each for weakness in WEAKNESSES.values() for each in weakness.advisories}
    named = {advisory for table in (DEADLY, GRAMMARS, GREEDY) for advisory, _ in table.values()}
    assert named <= advisories
    assert all(re.fullmatch(r"(CVE|PYSEC)-\d{4}-\d+|GHSA(-\w{4}){3}", each) for each in advisories)
