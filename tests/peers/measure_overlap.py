"""Whole steps beside two steps in flight: the processor time of the same sixteen answers of the default model.

python -m tests.peers.measure_overlap
"""

import time

from optimized.checkpoint import load_checkpoint
from optimized.engine import EngineCore
from optimized.llama import LlamaModel
from optimized.model_store import default_model
from optimized.torch_device import TorchDevice
from spec.vocabulary import Config, Request

CONFIG = Config(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=64)


def serve(model: LlamaModel, overlap: bool) -> str:
    """Sixteen prompts of 8 tokens, answers of 12."""
    core = EngineCore(CONFIG, TorchDevice(model, CONFIG))
    for number in range(16):
        core.add(Request(number, tuple(range(1 + number, 9 + number)), 12, (number,)))
    started = time.process_time()
    while core.has_work:
        if overlap:
            while len(core.scheduler.flights) < 2 and core.begin_step() is not None:
                pass
            core.end_step()
        else:
            core.step()
    return f"{time.process_time() - started:.2f} s in {core.scheduler.counters.num_steps} steps"


def main() -> None:
    checkpoint = load_checkpoint(default_model())
    model = LlamaModel(checkpoint.config, checkpoint.tensors)
    serve(model, overlap=False)
    for _ in range(3):
        print(f"whole steps: {serve(model, overlap=False)}; two in flight: {serve(model, overlap=True)}")


if __name__ == "__main__":
    main()
