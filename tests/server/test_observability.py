"""What a server says of itself: a heartbeat, a line for each request, metrics, and no word of what it was told in secret."""

import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from optimized.block_residency import BlockResidency
from optimized.checkpoint import Checkpoint
from optimized.doctor import source_digest
from optimized.model_core import TorchCore
from optimized.plan import Plan
from optimized.server.front import Front
from optimized.server.heartbeat import LOW_BEATS, Heartbeat
from optimized.server.limits import Limits
from optimized.server.logs import JsonLine, LossyLog, start_logging, text_line
from optimized.stats import Stats
from spec.rules import RULES, RuleViolation
from spec.vocabulary import Config, InvalidConfig, Observe
from tests.server.conftest import RunningServer, begun, held, running, waited_for

ROOT = Path(__file__).parents[2]
CONFIG = Config(num_blocks=100, block_size=4, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32)
START = Stats(
    blocks_prompt_shared=0,
    blocks_copied=0,
    num_preemptions=0,
    blocks_swapped_out=0,
    hit_tokens=0,
    steps=0,
    num_blocks=100,
    num_free_blocks=100,
)


def test_a_heartbeat_says_what_happened_in_vllms_words() -> None:
    heart = Heartbeat(CONFIG, START)
    assert heart.beat(START, 10.0) == []  # quiet while nothing happens
    busy = replace(
        START,
        steps=5,
        tokens_computed=500,
        tokens_sampled=100,
        num_running=8,
        num_waiting=2,
        num_free_blocks=25,
        queried_tokens=200,
        hit_tokens=50,
    )
    [line] = heart.beat(busy, 10.0)
    assert line.text == (
        "Avg prompt throughput: 40.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 8 reqs, "
        "Waiting: 2 reqs, GPU KV cache usage: 75.0%, Prefix cache hit rate: 25.0%, Preemptions: 0"
    )
    _, remedy = heart.beat(replace(busy, steps=6, num_preemptions=3), 10.0)
    assert (remedy.level, remedy.text) == (
        logging.WARNING,
        (
            "3 requests had to wait again, for want of blocks: fewer at once (max_num_seqs is 8) or more memory "
            "(num_gpu_blocks is 100) would help"
        ),
    )


def test_requests_that_wait_beside_an_empty_cache_name_max_num_seqs() -> None:
    heart = Heartbeat(CONFIG, START)
    low = [replace(START, steps=step, num_free_blocks=90, num_waiting=5) for step in range(1, 2 * LOW_BEATS + 1)]
    counts = [len(heart.beat(each, 10.0)) for each in low]
    assert counts == 2 * [*[1] * (LOW_BEATS - 1), 2]
    heart = Heartbeat(CONFIG, START)
    for each in low[: LOW_BEATS - 1]:
        heart.beat(each, 10.0)
    assert len(heart.beat(replace(low[-1], num_waiting=0), 10.0)) == 1


def test_a_line_is_text_or_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("kvproof.server", logging.INFO, "file", 1, "a\n%s", ("b",), None)
    record.created, record.msecs, record.request_id = 0.25, 250.0, "x"
    assert json.loads(JsonLine().format(record)) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "INFO",
        "logger": "kvproof.server",
        "message": "a\nb",
        "request_id": "x",
    }
    assert text_line().format(record) == "1970-01-01T00:00:00.250Z INFO a\nb"
    assert "\n" not in JsonLine().format(record)
    for form, level in (("xml", "INFO"), ("json", "LOUD")):
        with pytest.raises(InvalidConfig):
            start_logging(form, level, LossyLog())


def test_what_was_told_in_secret_is_nowhere(tiny: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = running(tiny, keys=("CANARYKEY",))
    key = {"authorization": "Bearer CANARYKEY"}
    try:
        body = {"prompt": "CANARYPROMPT", "cache_salt": "CANARYSALT", "user": "CANARYUSER", "max_tokens": 2}
        found = server.ask("POST", "/v1/completions", body, key)
        assert found.status == 200
        # The server writes its line after the answer.
        assert waited_for(lambda: "POST /v1/completions" in caplog.text)
        [line] = [each for each in caplog.messages if "/v1/completions" in each]
        assert re.fullmatch(r"[0-9a-f]{32} POST /v1/completions: 200 in \d+\.\d{3} s", line)
        assert line.startswith(found.headers["x-request-id"])
        refused = [
            server.ask("POST", "/v1/completions", {**body, "max_tokens": 1000}, key),
            server.ask("POST", "/v1/completions", {**body, "temperature": -1}, key),
            server.ask("GET", "/v1/models", None, {"authorization": "Bearer CANARYWRONG"}),
        ]
        server.ask("GET", "/a%0Ab%1b[31m", None, key)
        shown = server.ask("GET", "/metrics", None, key).body + b"".join(each.body for each in refused)
        assert b"CANARY" not in shown
        assert waited_for(lambda: r"GET /a\nb\x1b[31m: 404" in caplog.text)
        assert waited_for(lambda: sum("/v1/" in each for each in caplog.messages) == 1 + len(refused))
        assert "CANARY" not in caplog.text
        for polled in ("/ping", "/load"):
            assert server.ask("GET", polled, None, key).status == 200
        assert not [each for each in ("/metrics", "/ping", "/load") if each in caplog.text]
    finally:
        server.stop()


def names_in(page: str) -> set[str]:
    return {line.partition("{")[0].partition(" ")[0] for line in page.splitlines() if line and line[0] != "#"}


def test_the_dashboard_shows_metrics_that_there_are(server: RunningServer) -> None:
    server.complete(max_tokens=3)
    exposed = names_in(server.ask("GET", "/metrics").body.decode())
    dashboard = json.loads((ROOT / "docs" / "_static" / "grafana.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in shown for name in re.findall(r"(?:vllm|kvproof):\w+", expression)}
    assert used <= exposed
    assert len(used) > 15
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_the_book_lists_our_own_metrics(tiny: Checkpoint) -> None:
    server = running(tiny, front=Front(num_judged=lambda: 7, num_lost_events=lambda: 0))
    try:
        exposed = {
            family
            for family in re.findall(
                r"^# TYPE (kvproof:\w+) ", server.ask("GET", "/metrics").body.decode(), re.MULTILINE
            )
        }
        assert value(server, "kvproof:events_judged_total") == 7
    finally:
        server.stop()
    listed = set(re.findall(r"kvproof:\w+", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")))
    assert listed == {re.sub("_created$", "", name) for name in exposed}


def test_what_takes_time_is_measured(tiny: Checkpoint) -> None:
    server = running(tiny)
    try:
        choice = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
        assert [server.complete(max_tokens=9, **choice).status for _ in range(2)] == [200, 200]
        assert server.complete(structured_outputs={"regex": "("}, ignore_eos=False).status == 400
        found = {name: rows[0][1] for name, rows in samples(server).items()}
        assert found["kvproof:grammar_seconds_count"] == 2  # the second time it was there, and one was none
        steps, beside = (found[f"kvproof:{part}_seconds_sum"] for part in ("step", "scheduler_step"))
        assert found["kvproof:step_seconds_count"] == found["kvproof:scheduler_step_seconds_count"]
        assert 0 < beside < steps
        assert found["kvproof:connections"] == 1  # who asks
        assert found["kvproof:stalled_clients"] == found["kvproof:stream_unread_bytes"] == 0
        [(about, _)] = samples(server)["kvproof:build_info"]
        assert about["source"] == source_digest()
    finally:
        server.stop()


def test_how_a_request_ends_is_counted(tiny: Checkpoint) -> None:
    server = running(tiny, Limits(max_request_seconds=1))

    def ends() -> dict[str, float]:
        return {row["finished_reason"]: count for row, count in samples(server)["vllm:request_success_total"]}

    gate = held(server)
    try:
        assert server.complete(max_tokens=5).status == 408
        assert ends() == {"stop": 0, "length": 0, "abort": 1, "error": 0}
        gate.set()
        assert server.complete(max_tokens=1000).status == 400
        assert waited_for(lambda: server.engine.health.num_unfinished == 0)
        gate.clear()
        leaving = begun(server.port, max_tokens=5, stream=True)
        assert waited_for(lambda: server.engine.health.num_unfinished == 1)
        leaving.close()
        assert waited_for(lambda: ends()["abort"] == 2)
        gate.set()
        core = server.engine.llm._core
        assert isinstance(core, TorchCore)
        core.device.compute = broken  # type: ignore[method-assign]
        assert server.complete(max_tokens=1).status == 500
        assert ends() == {"stop": 0, "length": 0, "abort": 2, "error": 1}
    finally:
        gate.set()
        server.stop()


def broken(plan: Plan) -> list[int]:
    raise RuntimeError("the kernel has failed")


def value(server: RunningServer, name: str) -> float:
    found = re.findall(
        rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", server.ask("GET", "/metrics").body.decode(), re.MULTILINE
    )
    return sum(map(float, found))


def samples(server: RunningServer) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Everything that ``/metrics`` says, by its name: labels and value."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(server.ask("GET", "/metrics").body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_histograms_have_the_names_labels_and_bounds_of_vllm(tiny: Checkpoint) -> None:
    server = running(tiny, front=Front(residency=BlockResidency(1.0)))
    recorded = json.loads((Path(__file__).parent / "vllm_histograms.json").read_text(encoding="utf-8"))
    assert recorded["max_model_len"] == server.engine.llm.config.max_model_len
    found = samples(server)
    server.stop()
    names = {name.removesuffix("_bucket") for name in found if name.startswith("vllm:") and name.endswith("_bucket")}
    assert names == recorded["histograms"].keys()
    for name in sorted(names):
        buckets = found[f"{name}_bucket"]
        assert [float(labels["le"]) for labels, _ in buckets] == [*recorded["histograms"][name], float("inf")], name
        for labels, _ in buckets:
            assert {key: value for key, value in labels.items() if key != "le"} == {"model_name": "tiny", "engine": "0"}


def test_the_parts_of_a_request_add_up(tiny: Checkpoint) -> None:
    server = running(tiny)
    try:
        assert server.complete(prompt=[5, 6, 7, 8, 9], max_tokens=6).status == 200
        assert server.complete(prompt=[[5], [6]], n=2, max_tokens=5, stream=True, temperature=1).status == 200
        assert waited_for(lambda: samples(server)["vllm:request_queue_time_seconds_count"][0][1] == 3)
        found = {name: rows[0][1] for name, rows in samples(server).items()}
        parts = [found[f"vllm:request_{part}_time_seconds_sum"] for part in ("prefill", "decode")]
        assert sum(parts) == pytest.approx(found["vllm:request_inference_time_seconds_sum"])
        whole = found["vllm:e2e_request_latency_seconds_sum"]
        assert found["vllm:request_queue_time_seconds_sum"] + sum(parts) <= whole
        assert all(part > 0 for part in parts)
        assert found["vllm:inter_token_latency_seconds_count"] == 5 + 4 * 4  # tokens but the first ones
        assert found["vllm:inter_token_latency_seconds_sum"] <= 2 * found["vllm:request_decode_time_seconds_sum"] + 1e-9
        assert found["vllm:iteration_tokens_total_count"] <= found["kvproof:steps_total"]
        assert found["vllm:iteration_tokens_total_sum"] == 5 + 5 + 1 + 1 + 4 * 4  # the last one is not computed
        waiting = samples(server)["vllm:num_requests_waiting_by_reason"]
        reasons = {labels["reason"]: count for labels, count in waiting}
        assert reasons == {"capacity": 0, "deferred": 0}
    finally:
        server.stop()


def test_tokens_that_were_in_the_cache_are_not_computed_again(tiny: Checkpoint) -> None:
    residency = BlockResidency(1.0)
    server = running(
        tiny, front=Front(residency=residency), num_gpu_blocks_override=8, make_observer=residency.observer
    )
    try:
        for prompt in (list(range(5, 16)), list(range(5, 18)), [[*range(5, 10)], [*range(40, 51)]]):
            assert server.complete(prompt=prompt, max_tokens=1).status == 200
        assert waited_for(lambda: value(server, "vllm:request_prefill_kv_computed_tokens_count") == 4)
        # Blocks of 4 tokens: the second prompt finds two of the first one's, the third prompt one.
        assert value(server, "vllm:prompt_tokens_total") == 11 + 13 + 5 + 11
        assert value(server, "vllm:prompt_tokens_cached_total") == 8 + 4
        assert value(server, "vllm:request_prefill_kv_computed_tokens_sum") == 11 + (13 - 8) + (5 - 4) + 11
        buckets = samples(server)["vllm:request_prefill_kv_computed_tokens_bucket"]
        counts = {labels["le"]: count for labels, count in buckets}
        assert (counts["1.0"], counts["5.0"], counts["10.0"], counts["20.0"]) == (1, 2, 2, 4)
        # 3 blocks, 2 more, 1 and 3 more are taken: one more than there are, and more than were never used.
        assert value(server, "vllm:kv_block_lifetime_seconds_count") == 1
        assert value(server, "vllm:kv_block_idle_before_evict_seconds_count") == 1
        assert 0 < value(server, "vllm:kv_block_lifetime_seconds_sum") < 60
    finally:
        server.stop()
    plain = running(tiny)
    assert "vllm:kv_block_lifetime_seconds" not in samples(plain)
    plain.stop()


def test_a_request_that_is_turned_down_is_counted_under_the_limit_that_did_it(tiny: Checkpoint) -> None:
    server = running(tiny, Limits(max_num_queued_reqs=2, max_num_queued_tokens=8))
    gate = held(server)
    try:
        with ThreadPoolExecutor() as callers:
            first = callers.submit(server.complete, prompt=[5] * 4, max_tokens=1)
            assert waited_for(lambda: server.engine.health.num_unfinished == 1)
            assert server.complete(prompt=[5] * 8, max_tokens=1).status == 503
            second = callers.submit(server.complete, prompt=[6] * 4, max_tokens=1)
            assert waited_for(lambda: server.engine.health.num_unfinished == 2)
            assert server.complete(prompt=[5], max_tokens=1).status == 503
            rejected = {labels["reason"]: count for labels, count in samples(server)["vllm:admission_rejections_total"]}
            assert rejected == {"max_num_queued_tokens": 1, "max_num_queued_reqs": 1}
            gate.set()
            assert first.result().status == second.result().status == 200
    finally:
        gate.set()
        server.stop()


def test_blocks_and_slots_add_up_to_the_cache(server: RunningServer) -> None:
    server.complete(prompt="a prompt of some length", max_tokens=3)
    config = server.engine.llm.config
    assert value(server, "kvproof:blocks_free") + value(server, "kvproof:blocks_in_use") == config.num_blocks
    assert value(server, "kvproof:slots") == config.num_slots
    assert value(server, "vllm:cache_config_info") == 1
    for name in ("prompt_tokens", "generation_tokens", "params_n", "params_max_tokens"):
        assert value(server, f"vllm:request_{name}_count") > 0, name


def test_a_broken_rule_is_counted_and_the_engine_made_anew(tiny: Checkpoint) -> None:
    class Breaks:
        """An observer in whose eyes the third look is one too many."""

        num_looks = 0

        def event(self, event: Any) -> None:
            pass

        def settled(self, snapshot: Callable[[], Any]) -> None:
            Breaks.num_looks += 1
            if Breaks.num_looks == 3:
                raise RuleViolation(RULES["ALLOC-2"], snapshot(), Observe(), snapshot())

    server = running(tiny, make_observer=lambda config: Breaks())
    try:
        server.complete(max_tokens=5)
        assert waited_for(lambda: server.ask("GET", "/ready").status == 200)
        assert value(server, "kvproof:rule_violations_total") == 1
        assert server.complete(max_tokens=5).status == 200
    finally:
        server.stop()
