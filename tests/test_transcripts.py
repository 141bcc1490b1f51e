"""The golden stories: the executable model and every engine tell them in the same words."""

import os
from pathlib import Path

import pytest

import optimized
import reference
from spec.engine import EngineFactory
from tests.spec import model_engine
from tests.transcripts.story import read_story

FOLDER = Path(__file__).parent / "transcripts"
STORIES = sorted(path for path in FOLDER.glob("*.txt") if path.stem != "README")
ENGINES: dict[str, EngineFactory] = {
    "model": model_engine.make_engine,
    "reference": reference.make_engine,
    "optimized": optimized.make_engine,
}
SITUATIONS = {
    "fork_then_write",
    "preemption_by_recomputation",
    "preemption_by_swapping",
    "refused_at_the_watermark",
    "prompt_longer_than_the_budget",
    "abort_while_waiting",
    "abort_while_running",
    "a_cache_of_one_block",
}


def test_there_is_a_story_for_every_situation() -> None:
    assert {path.stem for path in STORIES} >= SITUATIONS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_is_told_in_the_same_words(path: Path, engine: str) -> None:
    story = read_story(path)
    factory = ENGINES[engine]
    if not story.can_run_on(factory(story.config).profile):
        pytest.skip(f"{engine} does not declare {', '.join(sorted(need.value for need in story.needs))}")
    told = story.told_by(factory)
    if os.environ.get("KVPROOF_REWRITE") and engine == "model":
        path.write_text(told, encoding="utf-8")
    assert told == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_begins_with_what_it_is_about(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")
