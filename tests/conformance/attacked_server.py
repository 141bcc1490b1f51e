"""A server of OpenAI's completions in sixty lines that takes nothing it does not know. It is there to be sabotaged."""

import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEYS, OPEN = [b"one-key", b"two-keys"], {"/health"}
WORDS = [" the", " a", " cat", " dog", " sat", " ran", " on", " by", " mat", ".", ",", " and"]
STATE = {"dead": False, "mask": None, "left": 0}
CACHE, COUNTS, RESULTS = set(), {}, {}  # cached prompts by key, requests by method, answers by id


def whole(least, most):
    return lambda value: type(value) is int and least <= value <= most


def one_of(*kinds):
    return lambda value: isinstance(value, kinds)


FIELDS = {
    "model": one_of(str),
    "prompt": lambda value: isinstance(value, str) and 0 < len(value) < 5000,
    "max_tokens": whole(1, 64),
    "temperature": lambda value: type(value) in (int, float) and 0 <= value <= 2,
    "n": whole(1, 4),
    "logprobs": whole(0, 0),
    "stream": one_of(bool),
    "user": one_of(str),
}


def answer(prompt, count, mask=None):
    """Words that depend on what came before."""
    text = ""
    for _ in range(count):
        digest = hashlib.sha256(f"{prompt}{text}".encode("utf-8", "replace")).digest()
        text += (mask or WORDS)[digest[0] % len(mask or WORDS)]
    return text


class Handler(BaseHTTPRequestHandler):
    protocol_version, timeout = "HTTP/1.1", 1

    def log_message(self, *_):
        pass

    def say(self, status, body):
        data = json.dumps(body).encode() if not isinstance(body, bytes) else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def respond(self):
        path = self.path.partition("?")[0]
        given = (self.headers["Authorization"] or "").encode("latin-1").removeprefix(b"Bearer ")
        key = next((each for each in KEYS if hmac.compare_digest(each, given)), None)
        COUNTS[self.command] = COUNTS.get(self.command, 0) + 1
        if key is None and path not in OPEN:
            return self.say(401, {"error": "no key"})
        if self.command == "GET":
            pages = {"/health": {}, "/v1/models": {"data": [{"id": "fake"}]}, "/metrics": COUNTS}
            return self.say(*((200, pages[path]) if path in pages else (404, {})))
        length = self.headers.get("Content-Length") or ""
        if not length.isdigit() or int(length) > 1 << 20:
            return self.say(413, {"error": "too long"})
        data = self.rfile.read(int(length))
        if self.headers["Content-Type"] != "application/json" or path != "/v1/completions":
            return self.say(404, {})
        try:
            ask = json.loads(data)
        except (ValueError, RecursionError):
            return self.say(400, {"error": "this is no JSON"})
        if not isinstance(ask, dict):
            return self.say(400, {"error": "this is no object"})
        wrong = [name for name, value in ask.items() if name not in FIELDS or not FIELDS[name](value)]
        if wrong or "prompt" not in ask:
            return self.say(400, {"error": f"{(wrong or ['prompt'])[0][:20]} is wrong"})
        if STATE["dead"]:
            return self.say(500, {"error": "the engine is dead"})
        self.complete(ask, key)

    do_GET = do_POST = respond

    def complete(self, ask, key):
        text = answer(ask["prompt"], ask.get("max_tokens", 16), STATE["mask"])
        cached = len(ask["prompt"]) if (key, ask["prompt"]) in CACHE else 0
        CACHE.add((key, ask["prompt"]))
        usage = {"prompt_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}}
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        self.say(200, {"choices": [choice] * ask.get("n", 1), "usage": usage})


def start():
    """A server on a port of its own: its address, and how to stop it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True, args=(0.01,)).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1", lambda: (server.shutdown(), server.server_close())
