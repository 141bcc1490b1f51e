"""What Prometheus is told: vLLM's names, labels and buckets for what means the same, and our own beside them."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from optimized.async_llm import AsyncLLM
from optimized.doctor import source_digest, version_of
from optimized.engine_thread import TOKEN_BUCKETS, EngineBusy
from optimized.fault_points import FaultPoint, reach
from optimized.outputs import RequestOutput
from optimized.request_times import Buckets, RequestTimes
from optimized.sampling import SamplingParams
from optimized.server.errors import told
from optimized.server.front import Front
from optimized.server.readers import Readers

LABELS = ("model_name", "engine")
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""Why a request is turned down, in vLLM's words, and"""
FINISHED = ("stop", "length", "abort", "error")
"""why one ends: the values of labels, of which there are no others."""


def token_buckets(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10 and so on, as far as a sequence may be long.

    >>> token_buckets(60)
    (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    """
    every = (float(digit * 10**power) for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in every if bound <= most)


class Metrics:
    """Counters of the front end, and the engine's numbers, which are read when somebody asks."""

    def __init__(self, engine: AsyncLLM, model_name: str, front: Front, readers: Readers) -> None:
        self._engine = engine
        self._front = front
        self._readers = readers
        self._build = {"version": version_of("kvproof") or "0", "source": source_digest()}
        self._labels = (model_name, "0")
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to the first token.", TTFT_BUCKETS)
        self._token = self._histogram(
            "request_time_per_output_token_seconds", "Time for each other one.", TOKEN_BUCKETS
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "Time of the whole request.", REQUEST_BUCKETS)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("prompt_tokens_cached", "Tokens of prompts that were in the cache.")
        self._generated = self._counter("generation_tokens", "Tokens of answers.")
        counts = token_buckets(engine.llm.config.max_model_len)
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt.", counts)
        self._lengths = self._histogram("request_generation_tokens", "Tokens of an answer.", counts)
        self._choices = self._histogram("request_params_n", "Answers that a request asks for.", (1, 2, 5, 10, 20))
        self._most_tokens = self._histogram("request_params_max_tokens", "Tokens that it asks for at most.", counts)
        self._longest = self._histogram("request_max_num_generation_tokens", "Tokens of the longest answer.", counts)
        self._preemptions = self._histogram(
            "request_num_preemptions", "How often it was preempted.", PREEMPTION_BUCKETS
        )
        self._queued = self._histogram("request_queue_time_seconds", "Until it was first scheduled.", REQUEST_BUCKETS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From then to its first token.", REQUEST_BUCKETS
        )
        self._decode = self._histogram("request_decode_time_seconds", "From then to its last token.", REQUEST_BUCKETS)
        self._inference = self._histogram("request_inference_time_seconds", "Both together.", REQUEST_BUCKETS)
        self._prefilled = self._histogram(
            "request_prefill_kv_computed_tokens", "Tokens of a prompt that were not in the cache.", counts
        )
        self._corrupted = self._counter("corrupted_requests", "Requests whose logits were no numbers.")
        self._done = Counter(
            "vllm:request_success", "Requests that ended.", (*LABELS, "finished_reason"), registry=self.registry
        )
        rejected = Counter(
            "vllm:admission_rejections", "Requests turned down.", ("model_name", "reason"), registry=self.registry
        )
        self._rejected = {reason: rejected.labels(model_name, reason) for reason in REJECTIONS}
        for reason in FINISHED:
            self._done.labels(*self._labels, reason)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return made.labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=self.registry).labels(*self._labels)

    def corrupted(self) -> None:
        """A request had logits that are no numbers."""
        self._corrupted.inc()

    def rejected(self, busy: EngineBusy) -> None:
        """A request was turned down, for one limit of the queue or the other."""
        self._rejected[REJECTIONS[busy.num_waiting_tokens is not None]].inc()

    def broken_off(self, error: BaseException) -> None:
        """A request ended without its last output: its client has left, it took too long, or something broke."""
        if isinstance(error, GeneratorExit | CancelledError | TimeoutError):
            self._done.labels(*self._labels, "abort").inc()
        elif not isinstance(error, Exception) or told(error).status >= 500:
            self._done.labels(*self._labels, "error").inc()

    def ended(self, output: RequestOutput, params: SamplingParams, started: float, first: float) -> None:
        """A request is done; times are those of ``time.monotonic``."""
        self._prompt_lengths.observe(len(output.prompt_token_ids))
        self._choices.observe(params.n)
        if params.max_tokens is not None:
            self._most_tokens.observe(params.max_tokens)
        for each in output.outputs:
            self._lengths.observe(len(each.token_ids))
        self._longest.observe(max(len(each.token_ids) for each in output.outputs))
        self._preemptions.observe(output.num_preemptions)
        if output.metrics is not None:
            self._observe(output.metrics)
        now, count = time.monotonic(), sum(len(each.token_ids) for each in output.outputs)
        self._ttft.observe(first - started)
        self._latency.observe(now - started)
        if count > len(output.outputs):
            self._token.observe((now - first) * len(output.outputs) / (count - len(output.outputs)))
        self._prompt.inc(len(output.prompt_token_ids))
        self._cached.inc(output.num_hit_tokens)
        self._prefilled.observe(len(output.prompt_token_ids) - output.num_hit_tokens)
        self._generated.inc(count)
        for each in output.outputs:
            self._done.labels(*self._labels, each.finish_reason or "abort").inc()

    def _observe(self, times: RequestTimes) -> None:
        """The parts of a request's time, as far as it came."""
        if times.begun is not None:
            self._queued.observe(times.begun - times.added)
            if times.first_token is not None and times.last_token is not None:
                self._prefill.observe(times.first_token - times.begun)
                self._decode.observe(times.last_token - times.first_token)
                self._inference.observe(times.last_token - times.begun)

    def collect(self) -> Iterator[Metric]:
        """The engine as of its last step."""
        stats, health = self._engine.stats(), self._engine.health
        used = stats.num_blocks - stats.num_free_blocks
        yield self._gauge("vllm:num_requests_running", "Requests that run.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting)
        reasons = {"capacity": stats.num_waiting, "deferred": 0}
        yield self._by_label("vllm:num_requests_waiting_by_reason", "What they wait for.", "reason", reasons)
        intervals, tokens = self._engine.histograms()
        yield self._buckets("vllm:inter_token_latency_seconds", "Time between two tokens.", intervals)
        yield self._buckets("vllm:iteration_tokens_total", "Tokens that a step computes.", tokens)
        took, beside = self._engine.step_times()
        yield self._buckets("kvproof:step_seconds", "Time of a step.", took)
        yield self._buckets("kvproof:scheduler_step_seconds", "The part of it beside the device.", beside)
        yield from self._clients()
        if (num_lost := self._front.num_lost_events) is not None:
            yield self._total("kvproof:trace_events_lost", "Events that no trace has.", num_lost())
            unwritten = self._front.num_unwritten_bytes()
            yield self._gauge("kvproof:trace_queue_bytes", "Bytes of a trace that wait for the disk.", unwritten)
        yield self._total("kvproof:log_lines_dropped", "Lines that nobody can read.", self._front.num_dropped_lines())
        if (residency := self._front.residency) is not None:
            yield self._buckets("vllm:kv_block_lifetime_seconds", "From when it is taken on.", residency.lifetimes)
            yield self._buckets("vllm:kv_block_idle_before_evict_seconds", "Since it was hit.", residency.idle_times)
            yield self._buckets("vllm:kv_block_reuse_gap_seconds", "Time between two hits.", residency.gaps)
        yield self._gauge("vllm:kv_cache_usage_perc", "The part of the blocks in use.", used / stats.num_blocks)
        yield self._gauge("kvproof:blocks_free", "Blocks that nobody holds.", stats.num_free_blocks)
        yield self._gauge("kvproof:blocks_cached", "Blocks that can be found by their tokens.", stats.num_cached_blocks)
        yield self._gauge("kvproof:blocks_in_use", "Blocks that somebody holds.", used)
        yield from self._slots()
        yield self._by("vllm:cache_config_info", "The cache's sizes.", self._sizes(), 1)
        kept = self._engine.llm.grammars.num_kept_bytes
        yield self._gauge("kvproof:grammar_cache_bytes", "About what grammars that are kept take.", kept)
        times = self._engine.llm.grammars.times
        yield self._buckets("kvproof:grammar_seconds", "Time to make a grammar, or to find that it is none.", times)
        yield self._by("kvproof:build_info", "What this server is made of.", self._build, 1)
        yield self._by("kvproof:self_check_info", "How the engine is judged.", {"mode": self._front.self_check}, 1)
        if (num_judged := self._front.num_judged) is not None:
            yield self._total("kvproof:events_judged", "Events that the rules were held to.", num_judged())
        yield self._total("kvproof:rule_violations", "How often it broke a rule.", health.num_violations)
        yield self._total(
            "kvproof:engine_restarts", "How often the engine died and was made anew.", health.num_restarts
        )
        age = health.seconds_since_step
        yield self._gauge("kvproof:last_step_age_seconds", "How long no step has ended.", 0.0 if age is None else age)
        yield self._total("vllm:prefix_cache_queries", "Tokens looked up.", stats.queried_tokens)
        yield self._total("vllm:prefix_cache_hits", "Tokens found.", stats.hit_tokens)
        yield self._total("vllm:num_preemptions", "Requests that had to wait again.", stats.num_preemptions)
        yield self._total("kvproof:steps", "Steps of the engine.", stats.steps)
        yield self._total("kvproof:blocks_copied", "Copies on write.", stats.blocks_copied)

    def _clients(self) -> Iterator[Metric]:
        """Those who read their answers, and those who do not."""
        readers = self._readers
        yield self._gauge("kvproof:connections", "Clients that are connected.", len(readers.connected))
        yield self._gauge(
            "kvproof:stalled_clients", "Clients that do not read as fast as is said.", readers.num_stalled
        )
        yield self._total("kvproof:client_stalls", "How often one began not to.", readers.num_stalls)
        yield self._gauge("kvproof:stream_unread_bytes", "Bytes that wait for the slowest.", readers.most_unread)
        yield self._total("kvproof:clients_given_up", "Clients that read nothing for too long.", readers.num_given_up)

    def _sizes(self) -> dict[str, str]:
        config = self._engine.llm.config
        return {"block_size": str(config.block_size), "num_gpu_blocks": str(config.num_blocks)}

    def _slots(self) -> Iterator[Metric]:
        """Where the slots of the cache are; the classes add up to all of them."""
        slots = self._engine.slots()
        if slots is not None:
            names = ("tokens", "reserved", "internal", "external")
            counts = {name: getattr(slots, name) for name in names}
            yield self._by_label("kvproof:slots", "Slots by what is in them.", "class", counts)

    def _by_label(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*LABELS, label))
        for value, count in values.items():
            family.add_metric((*self._labels, value), count)
        return family

    def _buckets(self, name: str, text: str, buckets: Buckets) -> Metric:
        family = HistogramMetricFamily(name, text, labels=LABELS)
        bounds = [*map(str, buckets.bounds), "+Inf"]
        family.add_metric(self._labels, list(zip(bounds, buckets.cumulative(), strict=True)), buckets.total)
        return family

    def _by(self, name: str, text: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*LABELS, *labels))
        family.add_metric((*self._labels, *labels.values()), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def text(self) -> bytes:
        """The text that ``/metrics`` answers with."""
        reach(FaultPoint.READ_METRICS)
        return generate_latest(self.registry)
