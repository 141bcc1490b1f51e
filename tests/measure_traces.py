"""Measures what docs/traces.md says: ``python -m tests.measure_traces``, with ``--model`` also on steps of a real model.

Processor time of one process; what is compared is interleaved, step by step.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import optimized
from optimized.cli.watch import SelfCheck, Watch
from optimized.device import Sampled
from optimized.engine import EngineCore
from optimized.llm import LLM
from optimized.plan import Plan
from optimized.sampling import SamplingParams
from spec.log_check import check_log, replay_log
from spec.trace import Reader, Trace, Writer, dumps, load
from spec.vocabulary import Config, Request

WATCHES: Mapping[str, tuple[SelfCheck, bool] | None] = {
    "unwatched": None,
    "--trace": (SelfCheck.OFF, True),
    "--self-check sampled": (SelfCheck.SAMPLED, False),
}


class NoDevice:
    """Computes nothing, so that what is left is bookkeeping."""

    def run(self, plan: Plan) -> list[Sampled]:
        return [7] * len(plan.sample_rows)


def watch(folder: Path, name: str) -> Watch | None:
    how = WATCHES[name]
    return None if how is None else Watch("optimized", how[0], folder / name if how[1] else None)


def write_log(path: Path, num_requests: int) -> None:
    """A log of requests of 72 to 264 tokens that share beginnings; every tenth has three samples."""
    rng = random.Random(0)
    config = Config(num_blocks=900, block_size=16, prefix_cache=True)
    with Writer(path, config, "optimized") as writer:
        engine = optimized.make_engine(config, writer)
        heads = [tuple(rng.randrange(50_000) for _ in range(64)) for _ in range(8)]
        for i in range(num_requests):
            prompt = rng.choice(heads) + tuple(rng.randrange(50_000) for _ in range(rng.randrange(8, 200)))
            seq_ids = tuple(range(4 * i, 4 * i + (3 if i % 10 == 0 else 1)))
            engine.add(Request(i, prompt, rng.randrange(20, 150), seq_ids))
        while engine.core.has_work:
            engine.step(lambda seq, tokens: (seq * 7919 + len(tokens)) % 50_000)


def speed(judge: Callable[[Reader], int], path: Path) -> str:
    with path.open("rb") as source:
        started = time.process_time()
        num_events = judge(Reader(source, path.name))
        seconds = time.process_time() - started
    return f"{num_events:,} events, {num_events / seconds:,.0f} a second"


def compare(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median processor time of each, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.process_time()
            step()
            times[name].append(time.process_time() - started)
    return {name: statistics.fmean(sorted(each)[: -(rounds // 50) or None]) for name, each in times.items()}


def bookkeeping(folder: Path, num_seqs: int, num_tokens: int) -> dict[str, float]:
    """What a step costs for each scheduled sequence, in seconds, by who watches."""
    config = Config(num_seqs * num_tokens // 8, max_num_seqs=num_seqs, max_num_batched_tokens=8192)
    steps: dict[str, Callable[[], object]] = {}
    for name in WATCHES:
        watching = watch(folder, name)
        core = EngineCore(config, NoDevice(), watching and watching.make_observer(config))
        for i in range(num_seqs):
            core.add(Request(i, tuple(range(num_tokens)), 1000, (i,)))
        while any(seq.num_computed < num_tokens for seq in core.scheduler.seqs.values()):
            core.step()
        steps[name] = core.step
    return {name: seconds / num_seqs for name, seconds in compare(steps, 160).items()}


def model_steps(folder: Path, num_seqs: int) -> dict[str, float]:
    """What a step of SmolLM2 costs on this CPU, in seconds, by who watches."""
    steps: dict[str, Callable[[], object]] = {}
    for name in WATCHES:
        watching = watch(folder, name)
        llm = LLM(num_gpu_blocks_override=600, make_observer=watching.make_observer if watching else None)
        for i in range(num_seqs):
            llm.add_request(str(i), [1 + i, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=200, ignore_eos=True))
        llm.step()
        steps[name] = llm.step
    return compare(steps, 24)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, plain = folder / "log", folder / "plain"
        write_log(log, 300)
        print("by counters, in batches:", speed(check_log, log))
        trace = load(log)
        plain.write_text(dumps(Trace(trace.config, trace.events, trace.engine)))
        print("by counters, an event a line:", speed(check_log, plain))
        write_log(log, 6)
        print("by every rule:", speed(replay_log, log))
        for num_seqs, num_tokens in ((64, 200), (256, 200), (64, 4000)):
            for watcher, seconds in bookkeeping(folder, num_seqs, num_tokens).items():
                of = f"a scheduled sequence ({num_seqs} of {num_tokens} tokens)"
                print(f"{watcher}: {seconds * 1e6:.2f} us {of}")
        if "--model" in sys.argv:
            found = model_steps(folder, 16)
            for watcher, seconds in found.items():
                more = 100 * (seconds / found["unwatched"] - 1)
                print(f"{watcher}: {seconds * 1e3:.1f} ms a model step of 16 sequences, {more:+.1f} %")


if __name__ == "__main__":
    main()
