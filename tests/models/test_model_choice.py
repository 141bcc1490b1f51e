"""A model that is put together from several places: a revision of the hub's, another tokenizer, another template."""

import json
from pathlib import Path

import pytest

from optimized.checkpoint import Checkpoint, load_checkpoint
from optimized.hub_cache import HubModel, cache_folder, is_hub_name, located
from optimized.model_choice import chosen_checkpoint
from optimized.model_store import BadModelFile, ModelUnavailable, resolve
from spec.vocabulary import InvalidConfig
from tests.llm.conftest import tiny as tiny  # noqa: PLC0414  the fixture

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model at two commits, as Hugging Face's tools keep it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "models--owner--name"
    for commit in (OLD, NEW):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps({"commit": commit}))
    for name, commit in (("main", NEW), ("v1", OLD), ("pr/1", OLD), ("bad", "../../..")):
        (folder / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / name).write_text(commit + "\n")
    for name, content in (("empty", b"\n"), ("dot", b"."), ("latin", b"\xff\xfe")):
        (folder / "refs" / name).write_bytes(content)
    return folder


def test_a_revision_is_one_folder_for_all_files(cached: Path) -> None:
    for revision, commit in (("main", NEW), ("v1", OLD), ("pr/1", OLD), (OLD, OLD), (NEW, NEW)):
        assert located(HubModel("owner/name", revision)) == cached / "snapshots" / commit
    assert resolve("owner/name") == cached / "snapshots" / NEW


def test_a_folder_on_this_machine_wins(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "config.json").write_text("{}")
    assert resolve("owner/name") == Path("owner/name")


@pytest.mark.parametrize(
    ("model", "revision", "sentence"),
    [
        ("owner/other", "main", "owner/other at main is not in .*'hf download owner/other --revision main'"),
        ("owner/name", "v2", "owner/name at v2 is not in"),
        ("owner/name", "bad", "owner/name at bad is not in"),
        ("owner/name", "empty", "owner/name at empty is not in"),
        ("owner/name", "dot", "owner/name at dot is not in"),
        ("owner/name", "latin", "owner/name at latin is not in"),
        ("owner/name", ".", "'.' is no name of a branch"),
        ("owner/name", "../main", "'../main' is no name of a branch"),
        ("owner/name", "/etc", "'/etc' is no name of a branch"),
        ("owner/name", "", "'' is no name of a branch"),
        ("../owner", "main", "'../owner' is none"),
        ("name.gguf", "main", "'name.gguf' is none"),
        ("", "main", "'' is none"),
    ],
)
def test_what_is_not_there_is_not_fetched(cached: Path, model: str, revision: str, sentence: str) -> None:
    with pytest.raises(ModelUnavailable, match=sentence):
        located(HubModel(model, revision))


def test_where_the_hubs_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/hub")
    monkeypatch.delenv("HF_HOME")
    assert cache_folder() == Path.home() / ".cache" / "huggingface" / "hub"
    assert not any(map(is_hub_name, ("a", "a/b/c", "/a", "a/", "./a", "a/..", "a b/c")))


def test_another_tokenizer_and_another_template(tiny: Checkpoint, tmp_path: Path) -> None:
    assert tiny.tokenizer is not None
    (tmp_path / "tokenizer.json").write_text(tiny.tokenizer.backend.to_str())
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content }}!")
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        found = chosen_checkpoint(str(tiny.path), tokenizer=place, chat_template=template)
        assert found.tokenizer is not None and found.tokenizer is not tiny.tokenizer
        assert found.tokenizer.encode("hello") == tiny.tokenizer.encode("hello")
        assert found.tokenizer.eos_token_ids == tuple(found.config.eos_token_ids)
        assert found.chat_text([{"role": "user", "content": "Hi"}]) == "Hi!"
    plain = chosen_checkpoint(str(tiny.path))
    assert plain.chat_template == load_checkpoint(tiny.path).chat_template


def test_files_that_do_not_fit_are_refused(tiny: Checkpoint, tmp_path: Path) -> None:
    assert tiny.tokenizer is not None
    vast = json.loads(tiny.tokenizer.backend.to_str())
    token = {"content": "<vast>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    vast["added_tokens"].append({**token, "normalized": False, "id": tiny.config.vocab_size})
    (tmp_path / "tokenizer.json").write_text(json.dumps(vast))
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_bytes(b"x" * ((1 << 20) + 1))
    path = str(tiny.path)
    with pytest.raises(InvalidConfig, match=f"tokenizer is .*with token {tiny.config.vocab_size}"):
        chosen_checkpoint(path, tokenizer=tmp_path)
    few = {"type": "WordLevel", "vocab": {"a": 0, "b": 900}, "unk_token": "a"}  # two tokens, one of them too large
    (tmp_path / "few").write_text(json.dumps({"version": "1.0", "model": few, "added_tokens": []}))
    with pytest.raises(InvalidConfig, match="with token 900"):
        chosen_checkpoint(path, tokenizer=tmp_path / "few")
    for name, reason in (("latin", "not UTF-8"), ("long", "at most 1,048,576 are read"), ("no", "no such file")):
        with pytest.raises(BadModelFile, match=reason):
            chosen_checkpoint(path, chat_template=tmp_path / name)
    with pytest.raises(BadModelFile, match="not a tokenizer"):
        chosen_checkpoint(path, tokenizer=tmp_path / "long")
