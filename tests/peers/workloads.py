"""The workloads of ``kvproof bench compare``, a line of JSON for each request.

    python tests/peers/workloads.py NAME [--n 64] [--seed 0] [--rate 0]

Token ids are random, so that prompts share nothing but what the workload says. ``--rate`` spreads the arrivals at random, so
many a second; otherwise all requests are there at once.
"""

import argparse
import json
import random
from collections.abc import Callable

Shape = tuple[list[int], int, int]
"""A prompt, the tokens of its answer, and how many answers."""


def draw_tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(100, 40_000) for _ in range(count)]


def mixed(draw: random.Random, n: int) -> list[Shape]:
    """Prompts of 32 to 256 tokens, answers of 16 to 128."""
    return [(draw_tokens(draw, draw.randint(32, 256)), draw.randint(16, 128), 1) for _ in range(n)]


def decode(draw: random.Random, n: int) -> list[Shape]:
    """Short prompts, long answers: weights and cache are read again and again."""
    return [(draw_tokens(draw, draw.randint(8, 32)), draw.randint(128, 256), 1) for _ in range(n)]


def prefill(draw: random.Random, n: int) -> list[Shape]:
    """Long prompts, hardly an answer: all arithmetic."""
    return [(draw_tokens(draw, draw.randint(512, 1024)), draw.randint(1, 8), 1) for _ in range(n)]


def shared_prefix(draw: random.Random, n: int) -> list[Shape]:
    """All prompts begin with the same 800 tokens."""
    system = draw_tokens(draw, 800)
    return [(system + draw_tokens(draw, draw.randint(16, 64)), draw.randint(16, 64), 1) for _ in range(n)]


def samples(draw: random.Random, n: int) -> list[Shape]:
    """Four answers to each prompt."""
    return [(draw_tokens(draw, draw.randint(128, 512)), draw.randint(16, 64), 4) for _ in range(n)]


def single(draw: random.Random, n: int) -> list[Shape]:
    """Requests of one size, to be served one after the other."""
    return [(draw_tokens(draw, 128), 64, 1) for _ in range(n)]


WORKLOADS: dict[str, Callable[[random.Random, int], list[Shape]]] = {
    each.__name__: each for each in (mixed, decode, prefill, shared_prefix, samples, single)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    asked = parser.parse_args()
    draw, now = random.Random(asked.seed), 0.0
    for prompt, max_tokens, n in WORKLOADS[asked.name](draw, asked.n):
        now += draw.expovariate(asked.rate) if asked.rate else 0.0
        print(json.dumps({"prompt_token_ids": prompt, "max_tokens": max_tokens, "n": n, "arrival_s": round(now, 4)}))


if __name__ == "__main__":
    main()
