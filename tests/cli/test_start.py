"""What a start does, counted and not timed: what it imports, and what of a model is in memory at once."""

import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu.memory import pool_of_zeros
from kernels.cpu.team import why_not
from optimized.checkpoint import LazyTensors, random_arrays, tensor_shapes
from optimized.cli.torch_start import LEFT_OUT, nothing_to_collect
from optimized.hf_checkpoint import load_directory
from optimized.llama import LlamaModel
from tests.cli.conftest import ROOT, Process, Run
from tests.kernels.test_int8 import needs_int8
from tests.models.test_llama import CONFIG
from tests.models.tiny_files import write_directory

NO_VECTORS = why_not()
NOT_NEEDED = frozenset(
    [
        "triton",
        "gguf",
        "safetensors",
        "fastapi",
        "starlette",
        "uvicorn",
        "msgspec",
        "prometheus_client",
        "llguidance",
        "pytest",
        "hypothesis",
        "reference",
        "transformers",
        "scipy",
        "pandas",
        "matplotlib",
        "IPython",
    ]
)
LOADED = "import atexit, sys\natexit.register(lambda: print(*sorted({name.partition('.')[0] for name in sys.modules})))"


@pytest.mark.slow
def test_an_answer_on_a_cpu_imports_only_what_it_needs(run: Run, process: Process, tiny_path: Path) -> None:
    arguments = ("generate", "a", "--model", tiny_path, "--max-tokens", 1, "--num-gpu-blocks-override", 8)
    assert run(*arguments).exit_code == 0  # the first start converts the file
    child = process(*arguments, before=LOADED)
    out, error = child.communicate()
    assert child.returncode == 0, error
    loaded = set(out.splitlines()[-1].split())
    assert {"torch", "tokenizers", "optimized"} <= loaded
    assert not loaded & NOT_NEEDED


class Watched(LazyTensors):
    """The tensors of a random model, and how many numbers of those that were read are in memory."""

    def __init__(self) -> None:
        super().__init__(tensor_shapes(CONFIG))
        self._arrays = random_arrays(CONFIG, 0)
        self._read: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.from_numpy(self._arrays[name].copy())
        self._read.append(weakref.ref(tensor))
        self.most = max(self.most, self.num_alive)
        return tensor

    @property
    def num_alive(self) -> int:
        return sum(tensor.numel() for tensor in self.alive())

    def alive(self) -> Iterator[torch.Tensor]:
        yield from (tensor for each in self._read if (tensor := each()) is not None)


def sizes() -> tuple[int, int]:
    """The numbers of the largest tensor, and of a layer."""
    counts = {name: torch.Size(shape).numel() for name, shape in tensor_shapes(CONFIG).items()}
    return max(counts.values()), sum(count for name, count in counts.items() if ".layers.0." in name)


@pytest.mark.skipif(NO_VECTORS is not None, reason=f"no vector kernels: {NO_VECTORS}")
@pytest.mark.parametrize("in_int8", [False, pytest.param(True, marks=needs_int8)])
def test_the_vector_model_has_one_layer_of_the_file_in_memory_at_a_time(in_int8: bool) -> None:
    from optimized.vector_model import VectorModel

    tensors = Watched()
    model = VectorModel(CONFIG, tensors, 1, in_int8)
    largest, layer = sizes()
    assert tensors.most <= largest + layer
    assert not tensors.num_alive
    assert model.num_weight_bytes


def test_a_model_in_other_numbers_has_one_layer_of_the_file_in_memory_at_a_time() -> None:
    tensors = Watched()
    LlamaModel(CONFIG, tensors, torch.bfloat16)
    largest, layer = sizes()
    assert tensors.most <= largest + layer


def test_a_model_in_the_numbers_of_the_file_has_no_number_twice() -> None:
    tensors = Watched()
    model = LlamaModel(CONFIG, tensors, torch.float32)
    held = [weight for layer in model.layers for weight in vars(layer).values() if isinstance(weight, torch.Tensor)]
    places = {weight.data_ptr() for weight in (*held, model.embedding, model.norm, model.lm_head)}
    assert all(tensor.data_ptr() in places for tensor in tensors.alive())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_tensor_that_was_read_leaves_no_mapping_of_its_file(tmp_path: Path) -> None:
    write_directory(tmp_path)
    checkpoint = load_directory(tmp_path)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    before = mapped()
    held = checkpoint.tensors["model.norm.weight"]
    assert mapped() == before + 1
    assert held.numel()
    del held
    for name in checkpoint.tensors:
        assert checkpoint.tensors[name].numel()
    assert mapped() == before == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_pages_of_a_pool_are_found_behind_its_back_and_what_is_written_stays() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    shape, before = (1 << 20,), resident()
    parts, toucher = pool_of_zeros(32, shape, torch.bfloat16)
    for index, part in enumerate(parts):
        part[-1] = index
    toucher.join()
    assert resident() - before > 32 * (1 << 21) * 3 // 4
    assert [float(part[-1]) for part in parts] == list(range(32))
    assert not any(part[:-1].any() for part in parts)
    assert len({part.data_ptr() for part in parts}) == 32


AFTERWARDS = """
from optimized.cli.torch_start import KNOWN, LEFT_OUT, import_torch
import_torch()
import inspect, sys, torch
print(torch.__version__ in KNOWN, sorted(sys.modules.keys() & set(LEFT_OUT)), hasattr(torch, "export"))
print(inspect.isfunction(inspect.getframeinfo))
import torch._meta_registrations, torch.export
print(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)).graph is not None)
"""


@pytest.mark.slow
def test_what_is_left_out_of_torch_is_there_for_whoever_asks_for_it() -> None:
    said = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, check=True, cwd=ROOT)
    known, restored, whole = said.stdout.splitlines()
    assert known in ("True [] False", f"False {sorted(LEFT_OUT)} True")
    assert restored == whole == "True"


def test_the_collector_looks_again_after_a_start_even_after_one_that_failed() -> None:
    with pytest.raises(ZeroDivisionError), nothing_to_collect():
        assert not gc.isenabled()
        _ = 1 / 0
    assert gc.isenabled()
    gc.unfreeze()
