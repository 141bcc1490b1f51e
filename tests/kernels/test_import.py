"""``import kernels`` is cheap and says what there is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(kernels.__file__).parent.parent


def test_import_loads_neither_torch_nor_triton_nor_numpy():
    program = "import sys, kernels; print([x for x in ('torch', 'triton', 'numpy', 'numba') if x in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        == "[]\n"
    )


WITHOUT_THE_INTERPRETER = """
import sys, torch, kernels
cache = torch.zeros(1, 1, 1, 32)
arguments = cache[0].clone(), cache[0].clone(), cache, cache, torch.tensor([0])
kernels.write_kv(*arguments)
kernels.paged_attention, kernels.copy_blocks, kernels.rms_norm, kernels.draw_tokens, kernels.cpu_paged_attention
print([name for name in ("triton", "kernels.attention_kernel", "kernels.cache_kernel") if name in sys.modules])
try:
    kernels.triton_write_kv(*arguments)
except kernels.BadArgument as error:
    print(error)
"""


@pytest.mark.slow
def test_the_cpu_needs_no_triton_and_a_kernel_needs_a_gpu_or_the_interpreter():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT_THE_INTERPRETER]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT).stdout
    assert output.splitlines() == [
        "[]",
        "key_cache has device cpu, needs a GPU, or TRITON_INTERPRET=1 set before triton is imported",
    ]


@pytest.mark.parametrize("name", kernels.__all__)
def test_every_public_name_is_there(name):
    assert getattr(kernels, name) is not None
    assert name in dir(kernels)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_kernel"):
        kernels.no_such_kernel  # noqa: B018
