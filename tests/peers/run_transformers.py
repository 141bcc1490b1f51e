"""transformers as a peer of ``kvproof bench compare``: static batches of 16, padded, each run to its longest answer.

In bfloat16, and in float32 on a CPU that has no fast bf16 products in torch: what serves it best.
"""

import argparse
import json
import sys
import time

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--enable-prefix-caching", action="store_true")  # it has none
    asked = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        asked.model, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    ).eval()
    pad = 0

    @torch.inference_mode()
    def answer(requests: list[dict]) -> int:  # type: ignore[type-arg]
        width, longest = (
            max(len(each["prompt_token_ids"]) for each in requests),
            max(each["max_tokens"] for each in requests),
        )
        ids, mask = (
            torch.full((len(requests), width), pad),
            torch.zeros((len(requests), width), dtype=torch.int64),
        )
        for row, each in enumerate(requests):
            prompt = torch.tensor(each["prompt_token_ids"])
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=pad,
            eos_token_id=None,
        )
        return sum(each["max_tokens"] for each in requests)

    print(json.dumps({"engine": "transformers", "dtype": str(dtype).removeprefix("torch.")}), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        with open(wanted["workload"], encoding="utf-8") as file:
            requests = [json.loads(each) for each in file]
        tokens_in = sum(len(each["prompt_token_ids"]) for each in requests)
        requests = [each for each in requests for _ in range(each["n"])]
        size = 1 if wanted["serial"] else BATCH
        started = time.perf_counter()
        tokens_out = sum(answer(requests[first : first + size]) for first in range(0, len(requests), size))
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "tokens_in": tokens_in, "tokens_out": tokens_out}), flush=True)


if __name__ == "__main__":
    main()
