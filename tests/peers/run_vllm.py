"""vLLM as a peer of ``kvproof bench compare``: ``setup_vllm_cpu.sh DIR`` makes a DIR/run that calls this with its best settings."""

import argparse
import json
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--enable-prefix-caching", action="store_true")
    parser.add_argument("--dtype")
    asked = parser.parse_args()

    import torch
    from vllm import LLM, SamplingParams

    # Where the processor has no instructions for bfloat16, float32 is what vLLM is fastest in.
    dtype = asked.dtype or ("bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32")
    llm = LLM(
        asked.model,
        dtype=dtype,
        max_model_len=2048,
        block_size=32,  # its CPU attention wants a multiple of 32
        max_num_seqs=64,
        enable_prefix_caching=asked.enable_prefix_caching,
    )
    print(json.dumps({"engine": "vllm", "dtype": dtype}), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        with open(wanted["workload"], encoding="utf-8") as file:
            requests = [json.loads(each) for each in file]
        prompts = [{"prompt_token_ids": each["prompt_token_ids"]} for each in requests]
        params = [
            SamplingParams(
                temperature=0.0 if each["n"] == 1 else 1.0,
                max_tokens=each["max_tokens"],
                n=each["n"],
                ignore_eos=True,
            )
            for each in requests
        ]
        llm.reset_prefix_cache()
        started = time.perf_counter()
        if wanted["serial"]:
            outputs = [llm.generate([p], [s], use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens_in = sum(len(each["prompt_token_ids"]) for each in requests)
        tokens_out = sum(len(each.token_ids) for output in outputs for each in output.outputs)
        print(json.dumps({"seconds": seconds, "tokens_in": tokens_in, "tokens_out": tokens_out}), flush=True)


if __name__ == "__main__":
    main()
