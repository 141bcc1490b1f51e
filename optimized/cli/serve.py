"""``kvproof serve``: an OpenAI-compatible server for one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optimized.cli.generate import SELF_CHECK_BLOCKS
from optimized.cli.guard import plain_errors
from optimized.cli.settings import read_config, with_limits
from optimized.cli.watch import SelfCheck, Watch
from optimized.server.limits import Limits

MAX_KEY_BYTES = 1 << 20


@plain_errors
@with_limits
def serve(
    *,
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A GGUF file, a Hugging Face directory, or ORG/NAME[@REVISION][:FILE.gguf] of the hub.",
            envvar="KVPROOF_MODEL",
            show_default="SmolLM2-135M-Instruct",
        ),
    ] = None,
    host: Annotated[str, typer.Option(envvar="KVPROOF_HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="KVPROOF_PORT", help="The port; 0 takes a free one.")] = 8000,
    uds: Annotated[
        str | None,
        typer.Option(envvar="KVPROOF_UDS", help="A socket in the file system to listen on, instead of host and port."),
    ] = None,
    root_path: Annotated[
        str, typer.Option(envvar="KVPROOF_ROOT_PATH", help="What stands before every path where a proxy passes it on.")
    ] = "",
    ssl_keyfile: Annotated[
        str | None, typer.Option(envvar="KVPROOF_SSL_KEYFILE", help="The key of the certificate.")
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(envvar="KVPROOF_SSL_CERTFILE", help="A certificate: speak TLS.")
    ] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(envvar="KVPROOF_SSL_CA_CERTS", help="Whose certificates callers may show.")
    ] = None,
    ssl_cert_reqs: Annotated[
        int,
        typer.Option(
            envvar="KVPROOF_SSL_CERT_REQS", help="Whether callers show one: 0 no, 1 if they have one, 2 always."
        ),
    ] = 0,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="KVPROOF_API_KEY", help="A key; others can see it in the process list.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(envvar="KVPROOF_API_KEY_FILE", help="A file with a key on each line.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated", envvar="KVPROOF_ALLOW_UNAUTHENTICATED", help="Listen to all without a key."
        ),
    ] = False,
    shared_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--shared-prefix-cache",
            envvar="KVPROOF_SHARED_PREFIX_CACHE",
            help="Callers with different keys find each other's blocks, and can tell that they do.",
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(envvar="KVPROOF_TOKENIZER", help="A tokenizer.json, or its folder, instead of the model's own."),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            envvar="KVPROOF_REVISION", help="Branch, tag or commit of a model ORG/NAME; for all of its files."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(envvar="KVPROOF_CHAT_TEMPLATE", help="A file with a chat template instead of the model's own."),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(
            envvar="KVPROOF_GENERATION_CONFIG",
            help="What requests do not say of sampling: auto, the model's generation_config.json; vllm, none; or a file.",
        ),
    ] = "auto",
    override_generation_config: Annotated[
        str | None,
        typer.Option(
            envvar="KVPROOF_OVERRIDE_GENERATION_CONFIG",
            help="A JSON object with what counts instead of that: temperature, top_p, max_new_tokens and the like.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVPROOF_SERVED_MODEL_NAME",
            help="What the model is called.",
            show_default="its file's name, and default",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(envvar="KVPROOF_MAX_MODEL_LEN", help="The longest sequence.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(envvar="KVPROOF_MAX_NUM_SEQS", help="The most at once.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(envvar="KVPROOF_MAX_NUM_BATCHED_TOKENS", help="The most tokens in one step.")
    ] = None,
    max_num_partial_prefills: Annotated[
        int,
        typer.Option(
            envvar="KVPROOF_MAX_NUM_PARTIAL_PREFILLS",
            help="So many prompts may be computed in parts at a time, and share a step's tokens.",
        ),
    ] = 1,
    block_size: Annotated[int, typer.Option(envvar="KVPROOF_BLOCK_SIZE", help="Tokens per block.")] = 16,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(envvar="KVPROOF_NUM_GPU_BLOCKS_OVERRIDE", help="Blocks of the KV cache.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(envvar="KVPROOF_GPU_MEMORY_UTILIZATION", help="The part of a GPU's memory to use.")
    ] = 0.9,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(envvar="KVPROOF_KV_CACHE_MEMORY_BYTES", help="Size of the KV cache.")
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            envvar="KVPROOF_ENABLE_PREFIX_CACHING",
            help="Find blocks by what is in them.",
        ),
    ] = True,
    prefix_caching_hash_algo: Annotated[
        str, typer.Option(envvar="KVPROOF_PREFIX_CACHING_HASH_ALGO", help="sha256: the only one.")
    ] = "sha256",
    chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            envvar="KVPROOF_ENABLE_CHUNKED_PREFILL",
            help="Long prompts take several steps: always.",
        ),
    ] = True,
    tensor_parallel_size: Annotated[
        int, typer.Option(envvar="KVPROOF_TENSOR_PARALLEL_SIZE", help="1: one device.")
    ] = 1,
    dtype: Annotated[str, typer.Option(envvar="KVPROOF_DTYPE", help="The type of the numbers.")] = "auto",
    threads: Annotated[int | None, typer.Option(envvar="KVPROOF_THREADS", help="Threads on a CPU.")] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            envvar="KVPROOF_KV_CACHE_DTYPE", help="auto: the model's; fp8: 8 bits, and a scale for each token and head."
        ),
    ] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(
            envvar="KVPROOF_QUANTIZATION",
            help="int8: the layers' weights in 8 bits; gguf: in the 4 bits of the file; on a CPU.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(envvar="KVPROOF_SEED", help="For requests that bring none.")] = 0,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            envvar="KVPROOF_SCHEDULING_POLICY",
            help="fcfs; priority: smaller numbers first; static: nobody joins those who run once one has a token.",
        ),
    ] = "fcfs",
    admission_rule: Annotated[
        str,
        typer.Option(
            envvar="KVPROOF_ADMISSION_RULE",
            help="Who is let in has room for its next step (optimistic), its tokens (prompt), or to its end (no_evict).",
        ),
    ] = "prompt",
    watermark_blocks: Annotated[
        int, typer.Option(envvar="KVPROOF_WATERMARK_BLOCKS", help="Free blocks that whoever is let in must leave.")
    ] = 0,
    preemption_mode: Annotated[
        str, typer.Option(envvar="KVPROOF_PREEMPTION_MODE", help="auto, recompute or swap.")
    ] = "auto",
    swap_space: Annotated[
        float | None, typer.Option(envvar="KVPROOF_SWAP_SPACE", help="GiB of host memory for preempted requests.")
    ] = None,
    self_check: Annotated[
        SelfCheck, typer.Option(envvar="KVPROOF_SELF_CHECK", help="Judge the engine by the rules while it serves.")
    ] = SelfCheck.OFF,
    kv_cache_metrics: Annotated[
        bool,
        typer.Option(
            "--kv-cache-metrics/--no-kv-cache-metrics",
            envvar="KVPROOF_KV_CACHE_METRICS",
            help="Tell in /metrics how long blocks keep what is in them.",
        ),
    ] = False,
    kv_cache_metrics_sample: Annotated[
        float, typer.Option(envvar="KVPROOF_KV_CACHE_METRICS_SAMPLE", help="The part of the blocks that is looked at.")
    ] = 0.01,
    trace: Annotated[Path | None, typer.Option(envvar="KVPROOF_TRACE", help="Write every event to this file.")] = None,
    sse_keep_alive_interval: Annotated[
        float,
        typer.Option(
            envvar="KVPROOF_SSE_KEEP_ALIVE_INTERVAL",
            help="Seconds without an event after which a stream has a comment; 0 is never.",
        ),
    ] = 0.0,
    enable_request_id_headers: Annotated[
        bool,
        typer.Option(
            "--enable-request-id-headers",
            envvar="KVPROOF_ENABLE_REQUEST_ID_HEADERS",
            help="Each answer has its x-request-id: always.",
        ),
    ] = True,
    disable_fastapi_docs: Annotated[
        bool, typer.Option("--disable-fastapi-docs", envvar="KVPROOF_DISABLE_FASTAPI_DOCS", help="No /openapi.json.")
    ] = False,
    metrics_public: Annotated[
        bool, typer.Option("--metrics-public", envvar="KVPROOF_METRICS_PUBLIC", help="/metrics wants no key.")
    ] = False,
    enable_log_requests: Annotated[
        bool,
        typer.Option(
            "--enable-log-requests/--no-enable-log-requests",
            envvar="KVPROOF_ENABLE_LOG_REQUESTS",
            help="Log what each request asks for, and at DEBUG its prompt and its form.",
        ),
    ] = False,
    max_log_len: Annotated[
        int, typer.Option(envvar="KVPROOF_MAX_LOG_LEN", help="Characters of each that are logged at most.")
    ] = 1000,
    log_format: Annotated[
        str, typer.Option(envvar="KVPROOF_LOG_FORMAT", help="text, or json: an object a line.")
    ] = "text",
    log_level: Annotated[str, typer.Option(envvar="KVPROOF_LOG_LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    ui: Annotated[
        bool, typer.Option("--ui/--no-ui", envvar="KVPROOF_UI", help="A page at /, with a chat and a map of the cache.")
    ] = True,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="KVPROOF_CONFIG",
            help="A file of these settings, in TOML or (.yaml) YAML.",
            callback=read_config,
            is_eager=True,
        ),
    ] = None,
    limits: Limits,
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    del config  # it has been read before anything else
    from optimized.block_residency import BlockResidency
    from optimized.cli.live_map import live_map
    from optimized.cli.lossy_trace import LossyTraces
    from optimized.generation_defaults import defaults_sentence, read_override
    from optimized.llm import LLM
    from optimized.model_choice import chosen_checkpoint
    from optimized.model_core import EngineArgs
    from optimized.server.front import Front
    from optimized.server.logs import LossyLog, start_logging
    from optimized.server.serve import Address
    from optimized.server.serve import serve as run
    from spec.vocabulary import InvalidConfig

    if self_check is SelfCheck.EVERY_STEP and num_gpu_blocks_override is None and kv_cache_memory_bytes is None:
        num_gpu_blocks_override = SELF_CHECK_BLOCKS

    demand_known(prefix_caching_hash_algo, chunked_prefill, tensor_parallel_size, enable_request_id_headers)
    address = Address(
        host,
        port,
        keys_of(api_key or [], api_key_file),
        allow_unauthenticated,
        uds=uds,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
        ssl_ca_certs=ssl_ca_certs,
        ssl_cert_reqs=ssl_cert_reqs,
    )
    traces, log = LossyTraces(limits.trace_queue_bytes), LossyLog()
    residency = BlockResidency(kv_cache_metrics_sample) if kv_cache_metrics else None
    watching = Watch("optimized", self_check, trace, residency=residency, traces=traces)
    front = Front(
        shared_prefix_cache=shared_prefix_cache,
        renderer=live_map() if ui else None,
        self_check=self_check.value,
        num_judged=None if self_check is SelfCheck.OFF else lambda: watching.num_judged,
        num_lost_events=None if trace is None else lambda: traces.num_lost,
        num_unwritten_bytes=lambda: traces.num_waiting_bytes,
        num_dropped_lines=lambda: log.num_dropped,
        residency=residency,
        root_path=root_path,
        disable_fastapi_docs=disable_fastapi_docs,
        metrics_public=metrics_public,
        sse_keep_alive_interval=sse_keep_alive_interval,
        enable_log_requests=enable_log_requests,
        max_log_len=max_log_len,
    )
    arguments = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_partial_prefills": max_num_partial_prefills,
        "block_size": block_size,
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "enable_prefix_caching": prefix_caching,
        "dtype": dtype,
        "threads": threads,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
        "seed": seed,
        "scheduling_policy": scheduling_policy,
        "admission_rule": admission_rule,
        "watermark_blocks": watermark_blocks,
        "preemption_mode": preemption_mode,
        "swap_space": swap_space,
    }
    override = read_override(override_generation_config)
    if not all(map(str.strip, served_model_name or ())):
        raise InvalidConfig("served_model_name", "", "not empty")
    EngineArgs(**arguments)  # type: ignore[arg-type]  # refuses what makes no sense before a model is fetched
    start_logging(log_format, log_level, log)
    source = context.get_parameter_source("api_key")
    if api_key and source is not None and source.name == "COMMANDLINE":
        say("warning: others on this machine see the key in the process list, --api-key-file keeps it from them")
    with watching as watch:
        checkpoint = chosen_checkpoint(model, revision, tokenizer, chat_template)
        llm = LLM(
            checkpoint,
            **arguments,  # type: ignore[arg-type]
            generation_config=generation_config,
            override_generation_config=override,
            make_observer=watch.make_observer if watch.is_wanted else None,
        )
        if llm.defaults:
            say(defaults_sentence(llm.defaults))
        names = served_model_name or [llm.checkpoint.name, "default"]
        run(llm, names, address, limits, say, front)


def say(line: str) -> None:
    """A line for whoever started it."""
    typer.echo(line, err=True)


def demand_known(hash_algo: str, chunked_prefill: bool, tensor_parallel_size: int, id_headers: bool) -> None:
    """Raise ``InvalidConfig`` for what vLLM's flags may ask, and this engine has one answer to."""
    from spec.vocabulary import InvalidConfig

    for name, value, only, why in (
        ("prefix_caching_hash_algo", hash_algo, "sha256", "blocks are found by SHA-256, and compared"),
        (
            "enable_chunked_prefill",
            chunked_prefill,
            True,
            "a step takes as much of a prompt as its budget has room for",
        ),
        ("tensor_parallel_size", tensor_parallel_size, 1, "a model runs on one device"),
        ("enable_request_id_headers", id_headers, True, "each answer has its x-request-id"),
    ):
        if value != only:
            raise InvalidConfig(name, value, f"{only}: {why}")


def keys_of(given: list[str], path: Path | None) -> list[str]:
    """Keys from the command line and from a file."""
    from spec.vocabulary import InvalidConfig

    lines: list[str] = []
    if path is not None:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_BYTES + 1)
        if len(content) > MAX_KEY_BYTES:
            raise InvalidConfig("api_key_file", str(path), f"a file of at most {MAX_KEY_BYTES:,} bytes")
        try:
            lines = content.decode().splitlines()
        except UnicodeDecodeError:
            raise InvalidConfig("api_key_file", str(path), "a text in UTF-8") from None
    found = [line.strip() for line in lines if line.strip()]
    if path is not None and not found:
        raise InvalidConfig("api_key_file", str(path), "a file with a key on each line, at least one")
    return [*given, *found]
