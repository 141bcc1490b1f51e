"""What the tests of models share: the real model, and a cache folder of their own for everything else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from optimized.checkpoint import Checkpoint, load_checkpoint
from optimized.model_store import default_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, as README's first command leaves it in the cache; fetched if it is not there."""
    return default_model()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Checkpoint:
    """The default model, loaded."""
    return load_checkpoint(smollm2_path)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder for one test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KVPROOF_HOME", str(folder))
    yield folder
