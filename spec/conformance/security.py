"""Attacks on a server from outside, one for each class of mistakes that servers have made, and what must come of it."""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from spec.conformance.attacker import Answer, Attacked, Listener
from spec.conformance.served_client import NotOffered, ServerFault
from spec.conformance.weaknesses import WEAKNESSES

Fields = Mapping[str, Any]  # Any: what a caller may send
COMPLETIONS, CHAT = "/completions", "/chat/completions"
INSIDE = re.compile(rb"0x[0-9a-f]{8,}|Traceback \(most recent|/site-packages/|File \"/|/usr/lib/python")
"""Addresses in memory, and places in a server's own files."""


class SecurityViolation(Exception):
    """A server has a weakness."""

    def __init__(self, weakness: str, server: Attacked, found: str, again: str) -> None:
        known = WEAKNESSES[weakness]
        self.weakness = weakness
        lines = [
            f"{weakness} does not hold: {known.sentence}",
            f"  server    {server.url}",
            f"  found     {found}",
            f"  like      {', '.join(known.advisories)}",
            "",
            "from spec.conformance.attacker import Attacked",
            f"from spec.conformance.security import {again.partition('(')[0]}",
            "",
            "",
            f"def test_{weakness.replace('-', '_')}_again(served_url):",
            f"    {again}",
        ]
        super().__init__("\n".join(lines))


class Attack:
    """One weakness of one server, and how a harmless caller is answered before the attack."""

    def __init__(self, server: Attacked, weakness: str, judge: str, *arguments: object) -> None:
        self.server, self.weakness = server, weakness
        keys = [repr(list(server.keys))] if server.keys else []
        made = f"Attacked({', '.join(['served_url', *keys])})"
        self._again = f"{judge}({', '.join([made, *map(repr, arguments)])})"
        self._before = server.control()

    def demand(self, holds: bool, found: str) -> None:
        """Raises ``SecurityViolation`` if it does not hold."""
        if not holds:
            raise SecurityViolation(self.weakness, self.server, found, self._again)

    def refused(self, answer: Answer, what: str) -> None:
        """Nothing was done for it."""
        self.demand(answer.is_refusal, f"{what}: {answer}")

    def survived(self, answer: Answer, what: str, *, may_hang_up: bool = False) -> None:
        """Whatever was answered, it was in time, and no failure of the server."""
        failed = not may_hang_up if answer.status is None else answer.status >= 500 and answer.status != 501
        self.demand(not failed and not answer.is_late, f"{what}: {answer}")
        self.demand(not INSIDE.search(answer.body), f"{what}: the answer shows the server's inside: {answer}")

    def unharmed(self, what: str) -> None:
        """The harmless caller is answered as before."""
        try:
            now = self.server.control()
        except ServerFault as fault:
            now = f"nothing ({fault})"
        self.demand(now == self._before, f"after {what} a harmless caller is answered {now!r}, before {self._before!r}")


# --- one request ------------------------------------------------------------------------------------------------------


def judge_poison(server: Attacked, weakness: str, path: str, fields: Fields) -> None:
    """A request that others have died of. It may be turned down or answered; the server goes on, for everybody."""
    attack = Attack(server, weakness, "judge_poison", weakness, path, fields)
    what = json.dumps({**fields})[:200]
    for _ in range(2):  # the second time its prompt may be in the cache
        attack.survived(server.post(path, {"max_tokens": 2, **_asked(path), **fields}), what)
    attack.unharmed(what)


def judge_greed(server: Attacked, path: str, fields: Fields) -> None:
    """A request for more than there is: turned down."""
    attack = Attack(server, "exhaustion", "judge_greed", path, fields)
    answer, what = server.post(path, {"max_tokens": 1, **_asked(path), **fields}), json.dumps({**fields})[:200]
    attack.survived(answer, what)
    attack.refused(answer, what)
    attack.unharmed("it")


def _asked(path: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a b c"}


def judge_bytes(server: Attacked, what: str) -> None:
    """Requests that are too much before anybody has read them: turned down."""
    attack = Attack(server, "exhaustion", "judge_bytes", what)
    answer = _bytes(server, what)
    attack.refused(answer, what)
    if "body of 64 MiB" in what or "without end" in what:
        attack.demand(not answer.was_read, f"{what} was read to its end, and then: {answer}")
    if "brackets" in what or "another kind" in what:
        attack.survived(answer, what)
    attack.unharmed(what)


def _bytes(server: Attacked, what: str) -> Answer:
    """What is answered to one of ``TOO_MUCH``."""
    target, models = f"{server.path}/completions", f"{server.path}/models"
    match what:
        case "a header of 1 MiB":
            return server.ask("GET", models, headers={"X-Long": "a" * (1 << 20)})
        case "10,000 headers":
            return server.ask("GET", models, headers={f"X-{i}": "a" for i in range(10_000)})
        case "a body of 64 MiB":
            return server.ask("POST", target, b'{"prompt": "' + b"a" * (64 << 20) + b'"}')
        case "a body in chunks without end":
            chunks = (b"100000\r\n" + b"a" * (1 << 20) + b"\r\n") * 64
            return server.ask("POST", target, chunks, {"Transfer-Encoding": "chunked", "Content-Length": ""})
        case "100,000 brackets inside each other":
            return server.ask("POST", target, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
        case "a body of another kind":
            kind = {"Content-Type": "multipart/form-data; boundary=x"}
            return server.ask(
                "POST", target, b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\na\r\n--x--', kind
            )
        case "a head that never ends":
            return server.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: ")
    raise ValueError(what)


TOO_MUCH = (
    "a header of 1 MiB",
    "10,000 headers",
    "a body of 64 MiB",
    "a body in chunks without end",
    "100,000 brackets inside each other",
    "a body of another kind",
    "a head that never ends",
)


# --- code, addresses, labels ------------------------------------------------------------------------------------------


def judge_objects(server: Attacked, path: str) -> None:
    """An object that calls us when it is loaded, as a body and where servers have loaded one."""
    attack = Attack(server, "deserialization", "judge_objects", path)
    with Listener() as listener:
        pickled = b"csocket\ncreate_connection\n((S'127.0.0.1'\nI%d\ntI3\ntR." % listener.port
        kinds = ("application/json", "application/octet-stream", "application/x-pickle", "application/x-msgpack")
        answers = [server.ask("POST", f"{server.path}{path}", pickled, {"Content-Type": kind}) for kind in kinds]
        for field in ("custom_logit_processor", "logits_processors", "prompt_embeds"):
            text = json.dumps({"callable": pickled.hex()}) if field == "custom_logit_processor" else pickled.decode()
            answers.append(server.post(path, {**_asked(path), field: text, "max_tokens": 1}))
        attack.demand(not listener.was_called.wait(0.2), "an object was loaded: it has called us")
    for answer in answers:
        attack.survived(answer, "an object")
    attack.unharmed("an object")


def judge_template(server: Attacked) -> None:
    """Templates of a caller's: one that calls us, one that takes an hour."""
    attack = Attack(server, "code", "judge_template")
    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
    with Listener() as listener:
        call = f"__import__('socket').create_connection(('127.0.0.1', {listener.port}), 3)"
        reach = "{{ cycler.__init__.__globals__.__builtins__." + call + " }}"
        for template in (reach, "{{ " + call + " }}", call, loop):
            for more in ({"chat_template": template}, {"chat_template_kwargs": {"chat_template": template}}):
                attack.survived(
                    server.post(CHAT, {**_asked(CHAT), "max_tokens": 1, **more}), f"the template {template}"
                )
        tools = [{"type": "function", "function": {"name": call, "parameters": {"type": "object", "x": reach}}}]
        attack.survived(server.post(CHAT, {**_asked(CHAT), "max_tokens": 1, "tools": tools}), "a tool with code in it")
        attack.demand(not listener.was_called.wait(0.2), "a template was run: it has called us")
    attack.unharmed("a template")


def judge_addresses(server: Attacked, kind: str) -> None:
    """Addresses of ours, and files of the server's, where an image, a sound or a film may be named."""
    attack = Attack(server, "foreign-address", "judge_addresses", kind)
    with Listener() as listener:
        here = f"127.0.0.1:{listener.port}"
        places = (f"http://{here}/a.png", f"http://example.com@{here}/", f"HTTP://{here}", f"ftp://{here}/")
        for place in (*places, "file:///etc/passwd", "data:image/png;base64,AAAA"):
            part = {"type": kind, kind: {"url": place, "data": place, "format": "wav"}}
            messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
            answer = server.post(CHAT, {"messages": messages, "max_tokens": 1})
            attack.survived(answer, f"{kind} {place}")
            attack.demand(b"root:" not in answer.body, f"{kind} {place}: the answer has a file of the server's")
        attack.demand(not listener.was_called.wait(0.2), f"{kind}: the server has asked an address of ours")
    attack.unharmed(kind)


def judge_labels(server: Attacked) -> None:
    """Methods, paths and ids that nobody has heard of are not in the metrics."""
    attack = Attack(server, "label", "judge_labels")
    for place in range(3):
        name = f"KVPROOFCANARY{place}"
        for answer in (
            server.ask(name, f"{server.path}/models"),
            server.ask("GET", f"/v1/{name}"),
            server.ask("GET", f"/v1/models/{name}"),
            server.post(COMPLETIONS, {"prompt": name, "max_tokens": 1, "user": name}, {"X-Request-Id": name}),
            server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "model": name}),
        ):
            attack.survived(answer, name, may_hang_up=True)
    shown = server.ask("GET", "/metrics").body
    attack.demand(b"KVPROOFCANARY" not in shown.upper(), "a name that a caller made up is in /metrics")
    attack.unharmed("unknown methods")


# --- keys -------------------------------------------------------------------------------------------------------------

OPEN = frozenset({"/", "/health", "/healthz", "/ready", "/readyz", "/live", "/livez", "/ping"})
"""What is told to anybody: that the server is there."""

KNOWN_ROUTES = (
    *("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score"),
    *(
        "/map",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/invocations",
        "/pooling",
    ),
    *("/score", "/rerank", "/classify", "/version", "/server_info", "/get_server_info", "/load", "/pause", "/resume"),
    *("/sleep", "/wake_up", "/abort_requests", "/reset_prefix_cache", "/flush_cache", "/start_profile", "/generate"),
    *(
        "/v1/load_lora_adapter",
        "/update_weights_from_disk",
        "/inference/v1/generate",
        "/debug",
        "/admin",
        "/slots",
        "/props",
    ),
    *("/v1/models/..%2f..%2f..%2fetc%2fpasswd", "/static/../../etc/passwd", "/v1/files/..%2f..%2fetc%2fpasswd"),
)
"""Routes that servers have, and have forgotten to guard."""

DENIED = frozenset({400, 401, 403, 404, 405})


def need_keys(server: Attacked, count: int = 1) -> None:
    """Raises ``NotOffered`` where too few keys are known."""
    if len(server.keys) < count:
        raise NotOffered(f"this needs {count} keys of the server: --conformance-key, once for each")


def judge_routes(server: Attacked) -> None:
    """Without a key every route is shut, known or not."""
    need_keys(server)
    attack = Attack(server, "open-route", "judge_routes")
    try:
        listed = list(json.loads(server.ask("GET", "/openapi.json").body)["paths"])
    except (ValueError, LookupError, TypeError):
        listed = []
    for route in dict.fromkeys((*listed, *KNOWN_ROUTES)):
        for method, body in (("GET", None), ("POST", b"{}"), ("POST", b'{"prompt": "a", "max_tokens": 1}')):
            if route in OPEN:
                continue
            answer = server.ask(method, re.sub(r"{[^}]*}", "x", route), body, with_key=False)
            attack.demand(answer.status in DENIED, f"{method} {route} without a key: {answer}")
    attack.unharmed("them")


DISGUISES: Mapping[str, Mapping[str, str]] = {
    "a query in the host": {"Host": "a/?x="},
    "a fragment in the host": {"Host": "evil/#"},
    "a path in the host": {"Host": "a/health?"},
    "original url": {"X-Original-URL": "/health", "X-Rewrite-URL": "/health"},
    "forwarded": {"X-Forwarded-Prefix": "/health", "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Path": "/health"},
    "method override": {"X-HTTP-Method-Override": "OPTIONS"},
}


def judge_disguise(server: Attacked, name: str) -> None:
    """No header makes one route look like another."""
    need_keys(server)
    attack = Attack(server, "open-route", "judge_disguise", name)
    for target in ("/v1/models", "/metrics"):
        answer = server.ask("GET", target, headers=DISGUISES[name], with_key=False)
        attack.demand(answer.status is None or answer.status in DENIED, f"{target} with {DISGUISES[name]}: {answer}")
    attack.unharmed(name)


DETOURS = ("//v1/models", "/health/../v1/models", "/./v1/models", "/%761/models", "/health%2f..%2fv1/models")
MORE_DETOURS = ("/v1/models/", "/v1/models;a=/health", "/V1/models", "/v1/models?a=/health", "http://a/v1/models")


def judge_detours(server: Attacked) -> None:
    """No other spelling of a route is open."""
    need_keys(server)
    attack = Attack(server, "open-route", "judge_detours")
    for target in (*DETOURS, *MORE_DETOURS):
        answer = server.ask("GET", target, with_key=False)
        is_shut = answer.status is None or answer.status in DENIED or 300 <= answer.status < 400
        attack.demand(is_shut, f"{target} without a key: {answer}")
    attack.unharmed("a detour")


def wrong_keys(key: str) -> Sequence[str]:
    """Headers that are nearly right."""
    near = (key[:-1], key + "x", key.swapcase(), key * 2, "", "EMPTY", "None", "null", "sk-1234", "token-abc123", "*")
    bearer = [f"Bearer {each}" for each in near if each != key]
    return (*bearer, "Bearer", f"Bearer \xe9{key}", "Bearer " + "a" * 5000)


def judge_wrong_keys(server: Attacked) -> None:
    """What is nearly a key is none, and does no harm."""
    need_keys(server)
    attack = Attack(server, "wrong-key", "judge_wrong_keys")
    for header in wrong_keys(server.keys[0]):
        answer = server.ask("GET", f"{server.path}/models", headers={"Authorization": header})
        attack.survived(answer, f"Authorization: {header[:60]!r}")
        attack.refused(answer, f"Authorization: {header[:60]!r}")
    attack.unharmed("wrong keys")


def judge_shared_cache(server: Attacked) -> None:
    """What one key has asked is, for another, not in the cache."""
    need_keys(server, 2)
    attack = Attack(server, "shared-cache", "judge_shared_cache")
    body = {"prompt": "A secret that nobody else knows: " + "x y z " * 60, "max_tokens": 1, "temperature": 0}
    for key in server.keys[:2]:
        answer = server.post(COMPLETIONS, body, {"Authorization": f"Bearer {key}"})
        try:
            found = json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        except (ValueError, LookupError, TypeError):
            raise NotOffered(f"nothing is said of cached tokens: {answer}") from None
        attack.demand(key == server.keys[0] or found == 0, f"another key is told of {found} cached tokens of the first")
    attack.unharmed("it")


# --- neighbours -------------------------------------------------------------------------------------------------------

MASKS: Mapping[str, Fields] = {
    "allowed tokens": {"allowed_token_ids": [1, 2]},
    "biased tokens": {"logit_bias": {"1": 100, "2": 100}},
    "ids outside": {"logit_bias": {"999999999": 100}, "allowed_token_ids": [999_999_999]},
    "a forced choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "penalties": {"repetition_penalty": 50.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    "bad words": {"bad_words": ["the", "a", "Paris", " "]},
}


def judge_masks(server: Attacked, name: str) -> None:
    """What one request asks of its tokens is not done to those beside it, nor to those after it."""
    attack = Attack(server, "neighbour", "judge_masks", name)
    alone = server.control()
    ask = partial(server.post, COMPLETIONS, {"prompt": "x y z", "max_tokens": 6, "temperature": 0, **MASKS[name]})
    with ThreadPoolExecutor(9) as threads:
        beside = [threads.submit(server.control) for _ in range(3)]
        others = [threads.submit(ask) for _ in range(6)]
        for other in others:
            attack.survived(other.result(), name)
        for each in beside:
            attack.demand(each.result() == alone, f"beside {name} a harmless caller is answered {each.result()!r}")
    attack.unharmed(name)


def judge_ids(server: Attacked) -> None:
    """Two requests with one id are two requests."""
    attack = Attack(server, "neighbour", "judge_ids")
    prompts = ("The capital of France is", "One, two, three, four,")
    alone = [server.control(prompt) for prompt in prompts]

    def ask(prompt: str) -> Answer:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        return server.post(COMPLETIONS, body, {"X-Request-Id": "mine", "X-Correlation-Id": "mine"})

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, prompts * 4))
    for prompt, text, answer in zip(prompts * 4, alone * 4, answers, strict=True):
        attack.survived(answer, prompt)
        if answer.status == 200:
            shown = json.loads(answer.body)["choices"][0]["text"]
            attack.demand(shown == text, f"{prompt!r} with the id of others is answered {shown!r}, alone {text!r}")
    attack.unharmed("two requests with one id")


def judge_leaving(server: Attacked) -> None:
    """Who goes away ends nobody's request but his own, whatever its id, and leaves nothing behind."""
    attack = Attack(server, "neighbour", "judge_leaving")
    body = json.dumps({"model": server.caller.model, "prompt": "a", "max_tokens": 64, "stream": True}).encode()
    key = f"Authorization: Bearer {server.keys[0]}\r\n" if server.keys else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )

    def stay() -> Answer:
        fields = {"prompt": "One, two, three, four,", "max_tokens": 40, "temperature": 0}
        return server.post(COMPLETIONS, fields, {"X-Request-Id": "abcdef"})

    with ThreadPoolExecutor(4) as threads:
        whole = stay()
        staying = [threads.submit(stay) for _ in range(4)]
        for name in ("", "a", "abc", "abcdef", "cmpl-"):
            server.begin(f"{head}{key}X-Request-Id: {name}\r\n\r\n".encode() + body)
        for each in staying:
            attack.survived(each.result(), "beside those who leave")
            attack.demand(
                _text(each.result()) == _text(whole), f"beside those who leave: {each.result()}, alone {whole}"
            )
    attack.unharmed("callers who left")


def _text(answer: Answer) -> object:
    try:
        return json.loads(answer.body)["choices"][0]["text"]
    except (ValueError, LookupError, TypeError):
        return answer.status


# --- what errors say --------------------------------------------------------------------------------------------------


def judge_errors(server: Attacked) -> None:
    """Nonsense of every kind: each error is about the request."""
    attack = Attack(server, "leak", "judge_errors")
    for body in (b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"prompt": {"a": [1]}}', b'{"prompt": [[[1]]]}'):
        for path in (COMPLETIONS, CHAT):
            attack.survived(server.ask("POST", f"{server.path}{path}", body), repr(body))
    for target in ("/v1/models/%00", "/v1/models/%ff", "/v1/models/" + "a" * 4000, "/%s%n%x", "/?q=" + "[" * 500, "*"):
        attack.survived(server.ask("GET", target), target[:60], may_hang_up=True)
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
        attack.survived(server.ask(method, f"{server.path}/completions"), method, may_hang_up=True)
    attack.unharmed("nonsense")
