"""Which of the two forward passes a CPU takes, and why: the vector kernels, or torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from optimized.checkpoint import ModelConfig
from spec.vocabulary import InvalidConfig

VARIABLE = "KVPROOF_CPU_KERNELS"
CHOICES = ("auto", "vector", "torch")


@dataclass(frozen=True)
class CpuPath:
    """The choice: the vector kernels or torch, and why not the vector kernels if not."""

    is_vector: bool
    dtype: str
    reason: str

    @property
    def sentence(self) -> str:
        """The choice as a person reads it."""
        which = "vector kernels" if self.is_vector else "torch and the CPU twins of the Triton kernels"
        return f"{which}: {self.reason}"


def cpu_path(
    model: ModelConfig | None,
    dtype: str,
    block_size: int,
    environment: Mapping[str, str] = os.environ,
    *,
    kv_cache_dtype: str = "auto",
) -> CpuPath:
    """What a model with these blocks takes; without a model, what most take. Raises ``InvalidConfig``."""
    asked = environment.get(VARIABLE, "auto")
    if asked not in CHOICES:
        raise InvalidConfig(VARIABLE, asked, f"one of {', '.join(CHOICES)}")
    obstacle = f"{VARIABLE} is torch" if asked == "torch" else _obstacle(model, dtype, block_size, kv_cache_dtype)
    if obstacle is None:
        from kernels.cpu.instructions import reason

        return CpuPath(True, "bfloat16", reason())
    if asked == "vector":
        raise InvalidConfig(VARIABLE, asked, f"something else here: {obstacle}")
    # Without the vector kernels a narrow type brings no speed on a CPU, only error.
    return CpuPath(False, "float32" if dtype == "auto" else dtype, obstacle)


QUANTIZATIONS = ("int8", "gguf")
"""What else the weights of layers may be: rounded to 8 bits, or as a GGUF file has them."""


def demand_narrow(path: CpuPath | None, quantization: str) -> None:
    """Raise ``InvalidConfig`` unless this path has such weights; None is that of a GPU."""
    if path is None:
        why: str | None = "a GPU is taken"
    elif not path.is_vector:
        why = path.reason
    else:
        why = why_not_narrow(quantization)
    if why is not None:
        raise InvalidConfig(
            "quantization", quantization, f"left out here, only the CPU's vector kernels have it: {why}"
        )


def why_not_narrow(quantization: str) -> str | None:
    """Why the vector kernels have no such weights here, or None if they have."""
    from kernels.cpu import team

    if (why := team.why_not()) is not None:
        return why
    from kernels.cpu import instructions

    return instructions.why_not_int8() if quantization == "int8" else instructions.why_not_four_bits()


def _obstacle(model: ModelConfig | None, dtype: str, block_size: int, kv_cache_dtype: str) -> str | None:
    """What keeps the vector kernels away."""
    from kernels.cpu.team import why_not

    if dtype not in ("auto", "bfloat16"):
        return f"{dtype} was asked for, they compute in bfloat16"
    if kv_cache_dtype != "auto":
        return f"a cache in {kv_cache_dtype} was asked for, they keep bfloat16"
    if block_size % 16:
        return f"blocks of {block_size} tokens, they need a multiple of 16"
    if model is not None and model.head_size % 16:
        return f"heads of {model.head_size}, they need a multiple of 16"
    return why_not()


def num_threads(asked: int | None, environment: Mapping[str, str] = os.environ) -> int:
    """As many as were asked for; or else as ``OMP_NUM_THREADS`` says, or one for each physical core that may be used.

    More than there are processors only wait for each other. Raises ``InvalidConfig``.
    """
    from kernels.cpu.team import usable_cores, usable_processors

    most = usable_processors()
    if asked is not None:
        if not 1 <= asked <= most:
            raise InvalidConfig("threads", asked, f"from 1 to {most}, the processors that this process may use")
        return asked
    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(most, int(given)) if given.isdecimal() and int(given) > 0 else usable_cores()
