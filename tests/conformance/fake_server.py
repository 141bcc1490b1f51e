"""A server of OpenAI's completions in sixty lines, whose model is a hash of what came before. It is there to be
sabotaged."""

import json
import math
import random
import re
import select
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = [" the", " a", " cat", " dog", " sat", " ran", " on", " by", " mat", ".", ",", " and", " then", " so", " it"]
CACHE: dict[str, int] = {}  # how often a prompt was seen
STATE = {"left": 0}


def logprobs_after(tokens):
    """The log-probability of each word."""
    draw = random.Random("".join(tokens))
    logits = [draw.gauss(0.0, 2.0) for _ in WORDS]
    total = math.log(sum(map(math.exp, logits)))
    return {word: logit - total for word, logit in zip(WORDS, logits, strict=True)}


def answer(tokens, index, ask):
    """Each token of an answer with its log-probabilities."""
    tokens = list(tokens)
    for position in range(ask["max_tokens"]):
        logs = logprobs_after(tokens)
        if ask["temperature"] == 0:
            word = max(logs, key=logs.get)
        else:
            draw = random.Random(f"{ask.get('seed')} {index} {position}")
            gumbel = {each: -math.log(-math.log(draw.random())) for each in WORDS}
            word = max(WORDS, key=lambda each: logs[each] / ask["temperature"] + gumbel[each])
        tokens.append(word)
        yield word, logs


def pieces(tokens, index, ask):
    """What is shown of an answer, a piece at a time, and at last why it ended."""
    text, shown, stops = "", 0, ask.get("stop") or []
    for word, logs in answer(tokens, index, ask):
        text += word
        top = dict(sorted(logs.items(), key=lambda each: -each[1])[: ask.get("logprobs") or 0])
        entry = {"tokens": [word], "token_logprobs": [logs[word]], "top_logprobs": [top], "text_offset": [0]}
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        held = 0 if ends else max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        settled = text[: min(ends, default=len(text) - held)]
        yield settled[shown:], entry if ask.get("logprobs") else None, "stop" if ends else None
        shown = len(settled)
        if ends:
            return
    yield text[shown:], None, "length"


def mistake(ask):
    """What is wrong with a request."""
    limits = {"n": (1, 128), "max_tokens": (1, 4096), "temperature": (0, 100), "top_p": (0, 1)}
    for name, (low, high) in limits.items():
        value = ask.get(name, low)
        if not isinstance(value, int | float) or not low <= value <= high:
            return f"{name} is {value!r}, it must be from {low} to {high}"
    return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send_json(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.send_json(200, {"data": [{"id": "fake"}]})

    def do_POST(self):
        ask = {"temperature": 1.0, **json.loads(self.rfile.read(int(self.headers["Content-Length"])))}
        if (wrong := mistake(ask)) is not None:
            return self.send_json(400, {"error": {"message": wrong}})
        prompt = ask["prompt"]
        tokens = re.findall(r"\s*\S+", prompt) if isinstance(prompt, str) else [f"<{each}>" for each in prompt]
        CACHE[repr(prompt)] = CACHE.get(repr(prompt), 0) + 1
        chunks, used = [], 0
        for index in range(ask.get("n", 1)):
            for text, entry, reason in pieces(tokens, index, ask):
                used += reason != "length"
                chunks.append({"index": index, "text": text, "logprobs": entry, "finish_reason": reason})
        usage = {"prompt_tokens": len(tokens), "completion_tokens": used, "total_tokens": len(tokens) + used}
        if ask.get("stream"):
            return self.send_stream([{"choices": [chunk]} for chunk in chunks] + [{"choices": [], "usage": usage}])
        self.send_json(
            200,
            {
                "choices": [whole([c for c in chunks if c["index"] == i]) for i in range(ask.get("n", 1))],
                "usage": usage,
            },
        )

    def send_stream(self, chunks):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for chunk in [*map(json.dumps, chunks), "[DONE]"]:
                self.wfile.write(f"data: {chunk}\n\n".encode())
                select.select([self.connection], [], [], 0.05 if len(chunks) > 32 else 0)  # or the caller leaves
        except OSError:
            STATE["left"] += 1


def whole(chunks):
    """The chunks of one answer as one choice."""
    entries = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    joined = {name: [each for entry in entries for each in entry[name]] for name in (entries[0] if entries else ())}
    text, reason = "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]
    return {"index": chunks[0]["index"], "text": text, "logprobs": joined or None, "finish_reason": reason}


def start():
    """A server on a port of its own: its address, and how to stop it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True, args=(0.01,)).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1", lambda: (server.shutdown(), server.server_close())
