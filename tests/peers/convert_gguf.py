"""A GGUF file as a Hugging Face directory in bfloat16, which every engine of ``kvproof bench compare`` can load.

    python tests/peers/convert_gguf.py FILE.gguf OUT

It needs transformers, gguf and accelerate in an environment of its own.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(source: Path, out: Path) -> None:
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: convert_gguf.py FILE.gguf OUT")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
