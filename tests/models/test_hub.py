"""Models of the hub: fetched once and whole from a hub on this machine, only what is read, and refused in one sentence."""

import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from optimized import hub_fetch
from optimized.checkpoint import load_checkpoint
from optimized.hub_cache import HubModel, is_whole, located
from optimized.hub_fetch import MAX_ANSWER_BYTES, MAX_FILES, SLACK_BYTES
from optimized.model_choice import chosen_checkpoint
from optimized.model_store import ModelUnavailable, resolve
from spec.vocabulary import InvalidConfig
from tests.models.fake_hub import COMMIT, OLDER, FakeHub
from tests.models.tiny_files import SMALL, write_directory, write_gguf

OTHERS = {
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"code",
    "README.md": b"#",
    "consolidated.safetensors": b"more",
}
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A model of two shards beside files that nobody reads, and an empty cache."""
    write_directory(tmp_path / "made", SMALL, num_shards=2)
    (tmp_path / "made" / "generation_config.json").write_text('{"temperature": 0.5}')
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "*")
    with FakeHub({**files, **OTHERS}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def test_a_model_is_fetched_once_and_only_what_is_read(hub: FakeHub, tmp_path: Path) -> None:
    found = load_checkpoint("org/name")
    assert hub.fetched == sorted(["config.json", "generation_config.json", INDEX, *SHARDS])
    assert found.path == tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert (found.name, found.generation_config) == ("org/name", {"temperature": 0.5})
    assert len(found.arrays()) > 10
    count = len(hub.asked)
    assert resolve("org/name") == resolve(f"org/name@{COMMIT}") == found.path
    assert len(hub.asked) == count


def test_every_file_is_of_the_commit_that_the_revision_was(hub: FakeHub) -> None:
    assert resolve("org/name@v1").name == OLDER
    assert {each.partition("/resolve/")[2].partition("/")[0] for each in hub.asked if "/resolve/" in each} == {OLDER}
    assert chosen_checkpoint("org/name", "v1").path.name == OLDER
    with pytest.raises(InvalidConfig, match="revision is 'v1', it must be left out, as org/name@main names one"):
        chosen_checkpoint("org/name@main", "v1")


def test_what_was_broken_off_goes_on(hub: FakeHub) -> None:
    found = resolve("org/name")
    (found / SHARDS[1]).resolve().unlink()
    (found / SHARDS[1]).unlink()
    assert not is_whole(found)
    hub.asked.clear()
    assert resolve("org/name") == found
    assert hub.fetched == [SHARDS[1]]
    assert is_whole(found)


def test_one_gguf_file_of_many(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path / "home"))
    write_gguf(tmp_path / "tiny.gguf")
    hub.files = {"tiny.Q4.gguf": (tmp_path / "tiny.gguf").read_bytes(), "tiny.Q8.gguf": b"large"}
    found = load_checkpoint("org/name:tiny.Q4.gguf")
    assert (found.name, hub.fetched) == ("tiny.Q4.gguf", ["tiny.Q4.gguf"])
    with pytest.raises(ModelUnavailable, match="it has no such file, but tiny.Q4.gguf, tiny.Q8.gguf"):
        resolve("org/name:other.gguf")
    hub.revisions["v2"] = "2" * 40
    with pytest.raises(
        ModelUnavailable, match="no config.json; of its GGUF files name one, org/name:FILE: tiny.Q4.gguf"
    ):
        resolve("org/name@v2")


def test_a_damaged_file_is_removed_and_the_revision_stays_unknown(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("config.json", SHARDS[0]):
        hub.lies = {name: b"x" * len(hub.files[name])}
        with pytest.raises(ModelUnavailable, match=f"{name} came damaged, and was removed: run again"):
            resolve("org/name")
        assert not (tmp_path / "hub" / "models--org--name" / "refs" / "main").exists()
    hub.lies = {}
    assert is_whole(resolve("org/name"))


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_tag_that_leads_out_of_the_cache_touches_nothing_there(
    hub: FakeHub, tmp_path: Path, is_absolute: bool
) -> None:
    """The library keeps a file under its tag, so it was read, written, and at last removed as a damaged one."""
    mine = tmp_path / "mine"
    for name in ("config.json", SHARDS[1]):
        mine.write_text("mine")
        hub.tags = {name: str(mine) if is_absolute else "../../../mine"}
        with pytest.raises(ModelUnavailable, match="the hub gives a file a tag that leads elsewhere, '"):
            resolve("org/name")
        assert mine.read_text() == "mine"
        mine.unlink()
        with pytest.raises(ModelUnavailable):
            resolve("org/name")
        assert not mine.exists()
        assert {each.name for each in tmp_path.iterdir()} == {"made", "hub"}
    hub.tags = {}
    assert is_whole(resolve("org/name"))


def test_a_file_that_is_more_than_its_size_does_not_fill_the_disk(hub: FakeHub, tmp_path: Path) -> None:
    hub.lies = {"config.json": b"x" * (SLACK_BYTES + (16 << 20))}
    with pytest.raises(ModelUnavailable, match="config.json has [0-9,]+ bytes, and more and more come"):
        resolve("org/name")
    assert sum(path.stat().st_size for path in (tmp_path / "hub").rglob("*") if path.is_file()) <= SLACK_BYTES + 4096


def test_a_list_without_end_is_refused(hub: FakeHub) -> None:
    hub.files |= {f"{number}.bin": b"" for number in range(MAX_FILES)}
    with pytest.raises(ModelUnavailable, match="it has 10,009 files, at most 10,000 are looked at"):
        resolve("org/name")


def test_a_client_that_the_library_makes_anew_is_watched_too(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library closes its client after a connection that failed, which a hub can bring about."""
    (tmp_path / "mine").write_text("mine")
    hub.tags = {"config.json": str(tmp_path / "mine")}
    monkeypatch.setattr("optimized.hub_fetch._listed", partial(_after_a_failure, hub_fetch._listed))
    with pytest.raises(ModelUnavailable, match="the hub gives a file a tag that leads elsewhere"):
        resolve("org/name")
    assert (tmp_path / "mine").read_text() == "mine"


def _after_a_failure(listed: Callable[..., object], *args: object) -> object:
    huggingface_hub.close_session()
    return listed(*args)


@pytest.mark.parametrize("header", [{"Retry-After": "9" * 30}, {"RateLimit": '"api";r=0;t=99999999'}])
def test_a_hub_does_not_say_how_long_we_wait(hub: FakeHub, header: dict[str, str]) -> None:
    hub.endless[f"org/name/resolve/{COMMIT}/config.json"] = (429, header, [b""])
    with pytest.raises(ModelUnavailable, match="the hub asks to wait for longer than 600 s"):
        resolve("org/name")


VAST, SPACES = {"Content-Length": str(1 << 40)}, itertools.repeat(b" " * 65_536)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_listing_without_end_is_not_taken_into_memory(hub: FakeHub, is_packed: bool) -> None:
    packed = gzip.compress(b" " * (2 * MAX_ANSWER_BYTES))
    packing = {"Content-Encoding": "gzip", "Content-Length": str(len(packed))}
    hub.endless["api/models"] = (200, packing, [packed]) if is_packed else (200, VAST, SPACES)
    with pytest.raises(ModelUnavailable, match="the hub's listing has more than 16,777,216 bytes"):
        resolve("org/name")


def test_an_error_without_end_is_not_taken_into_memory(hub: FakeHub) -> None:
    hub.endless["api/models/org/broken"] = (400, VAST, SPACES)
    with pytest.raises(ModelUnavailable, match="has more than 16,777,216 bytes"):
        resolve("org/broken")
    hub.endless[f"org/name/resolve/{COMMIT}/config.json"] = (403, VAST, SPACES)
    with pytest.raises(ModelUnavailable, match="an answer of the hub's has more than 16,777,216 bytes"):
        resolve("org/name")


def test_a_listing_that_comes_drop_by_drop_has_an_end(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimized.hub_fetch.MAX_ANSWER_S", 0.2)

    def drops() -> Iterator[bytes]:
        while True:
            time.sleep(0.02)
            yield b" "

    hub.endless["api/models"] = (200, VAST, drops())
    with pytest.raises(ModelUnavailable, match="the hub's listing is not there after 0.2 s"):
        resolve("org/name")


def test_a_model_without_its_tokenizer_is_not_whole(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers leaves it, which fetches the model and its tokenizer apart."""
    words = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})
    (tmp_path / "tokenizer.json").write_text(words)
    hub.files["tokenizer.json"] = words.encode()
    found = resolve("org/name")
    (found / "tokenizer.json").resolve().unlink()
    (found / "tokenizer.json").unlink()
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for revision in (None, "main"):
        with pytest.raises(ModelUnavailable, match="without its tokenizer.json, and HF_HUB_OFFLINE forbids") as raised:
            chosen_checkpoint("org/name", revision)
        assert "\n" not in str(raised.value)
        assert chosen_checkpoint("org/name", revision, tmp_path / "tokenizer.json").tokenizer is not None
    assert load_checkpoint(found).tokenizer is None
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert chosen_checkpoint("org/name", tokenizer=tmp_path / "tokenizer.json").tokenizer is not None
    assert hub.asked == []
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelUnavailable, match="org/name at main is not whole in .*, and cannot be fetched"):
        resolve("org/name")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert load_checkpoint("org/name").tokenizer is not None
    assert hub.fetched == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("org/other", "no file or folder 'org/other'; org/other at main is not in .*: the hub shows no such model"),
        ("org/name@v9", "org/name at v9 is not in .*, and cannot be fetched: it has no such revision"),
        ("org/gated", "access has to be granted first"),
        ("org/broken", "the hub does not answer as it should \\(BadRequestError"),
        ("org/name@../x", "'../x' is no name of a branch"),
        (f"org/name@{'a' * 300}", "'a{200}' is no name of a branch"),
        (f"org/name:{'a' * 300}.gguf", "'a{200}' is no name of a GGUF file"),
        ("org/name:../x.gguf", "'../x.gguf' is no name of a GGUF file"),
        ("org/name:model.safetensors", "is no name of a GGUF file"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_sentence(hub: FakeHub, model: str, sentence: str) -> None:
    with pytest.raises(ModelUnavailable, match=sentence) as raised:
        resolve(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "it has no config.json"),
        (INDEX, None, "it has no model.safetensors, and no other weights than safetensors are fetched"),
        (SHARDS[0], None, f"it has no {SHARDS[0]}"),
        (INDEX, b'{"weight_map": {"a": "../x.safetensors"}}', "it names no safetensors files"),
        (INDEX, b'{"weight_map": {"a": "pytorch_model.bin"}}', "it names no safetensors files"),
        (INDEX, b"[" * 100_000, "it names no safetensors files"),
    ],
)
def test_a_model_of_other_files_is_refused(hub: FakeHub, name: str, content: bytes | None, sentence: str) -> None:
    if content is None:
        del hub.files[name]
    else:
        hub.files[name] = content
    with pytest.raises(ModelUnavailable, match=sentence):
        resolve("org/name")
    assert "pytorch_model.bin" not in hub.fetched


def test_nothing_is_fetched_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailable, match="is not in .*, and HF_HUB_OFFLINE forbids to fetch it"):
        located(HubModel("org/name"))
    assert hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = resolve("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve("org/name") == found


def test_a_hub_that_is_not_there_and_a_disk_that_is_full(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ModelUnavailable, match="bytes, and .* has room for 10"):
        resolve("org/name")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelUnavailable, match="cannot be fetched: .*refused") as raised:
        resolve("org/name")
    assert "\n" not in str(raised.value)


def test_another_commit_than_the_one_that_was_asked_for_is_refused(hub: FakeHub) -> None:
    hub.revisions["d" * 40] = COMMIT
    with pytest.raises(ModelUnavailable, match=f"the hub calls it commit '{COMMIT}'"):
        resolve(f"org/name@{'d' * 40}")
    hub.revisions["main"] = "../../x"
    with pytest.raises(ModelUnavailable, match="the hub calls it commit '../../x'"):
        resolve("org/name")


def test_a_large_list_of_weights_names_nothing_beside_the_model(tmp_path: Path) -> None:
    for said in ("{}", "[]", "{", "[" * 100_000, json.dumps({"weight_map": {"a": "/etc/x.safetensors"}})):
        (tmp_path / INDEX).write_text(said)
        (tmp_path / "config.json").write_text("{}")
        assert not is_whole(tmp_path)
