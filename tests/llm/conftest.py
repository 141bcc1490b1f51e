"""Two models: a random one that is tiny and has a tokenizer, and the default one."""

from collections.abc import Iterator

import pytest

from optimized import LLM
from optimized.checkpoint import Checkpoint, load_checkpoint
from optimized.model_store import default_model
from tests.models.tiny_files import write_gguf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """A random model of 262 tokens, one a byte, and a context of 64."""
    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPROOF_HOME", str(folder / "home"))
        yield load_checkpoint(folder / "tiny.gguf")


@pytest.fixture
def llm(tiny: Checkpoint) -> LLM:
    """An engine for the tiny model, with blocks of 4 tokens."""
    return LLM(tiny, block_size=4, max_num_seqs=16)


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The default model; fetched if it is not in the cache."""
    return load_checkpoint(default_model())


@pytest.fixture(scope="session")
def smollm2_llm(smollm2: Checkpoint) -> LLM:
    """The default model, ready to answer in float32, whose texts are the same on every machine."""
    return LLM(smollm2, dtype="float32")
