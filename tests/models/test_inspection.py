"""What ``kvproof doctor --model`` says of a model: files and hashes that others can check, and why one is refused."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimized.capacity import bytes_per_block
from optimized.cli import app
from optimized.inspection import inspect_model
from optimized.model_store import ModelUnavailable
from tests.models.tiny_files import SMALL, TEMPLATE, TINY, write_directory, write_gguf


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_folder_is_told_file_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    write_directory(folder, replace(SMALL, sliding_window=5), num_shards=2)
    (folder / "generation_config.json").write_text('{"top_p": 0.9}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "modeling.py").write_text("never read")
    found = inspect_model("org/name", "a" * 40)
    assert (found.model, found.commit, found.refused) == ("org/name", "a" * 40, None)
    assert {each.name for each in found.files} == {path.name for path in folder.iterdir()} - {"modeling.py"}
    for each in found.files:
        content = (folder / each.name).read_bytes()
        assert (each.num_bytes, each.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert found.architecture == "MistralForCausalLM"
    assert found.shape is not None and found.shape["sliding_window"] == 5
    assert found.tensor_types is not None and set(found.tensor_types) == {"F32"}
    assert (found.num_tokens, found.has_chat_template, found.default_sampling_params) == (None, True, {"top_p": 0.9})
    assert found.bytes_per_block is not None
    sizes = {name: bytes_per_block(16, 2, 2, 16, *cell) for name, cell in {"bfloat16": (2, 0), "fp8": (1, 2)}.items()}
    assert sizes.items() <= found.bytes_per_block.items()
    text = found.text()
    assert "each sees 5" in text and "token ids only" in text and "top_p 0.9" in text


def test_a_gguf_file_in_both_forms(tmp_path: Path) -> None:
    arrays = write_gguf(tmp_path / "tiny.gguf")
    asked = ["doctor", "--model", str(tmp_path / "tiny.gguf")]
    done = CliRunner().invoke(app, [*asked, "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["can_be_served"], found["refused"], found["commit"]) == (0, True, None, None)
    assert found["num_parameters"] == sum(array.size for array in arrays.values())
    assert found["num_tokens"] == TINY.vocab_size
    assert (found["begin_token"], found["end_tokens"], found["has_chat_template"]) == ("<begin>", ["<end>"], True)
    lines = CliRunner().invoke(app, asked).stdout.splitlines()
    assert any(line.endswith(found["files"][0]["sha256"]) for line in lines)
    assert lines[-1].split() == ["served", "yes"]


def test_a_model_that_is_refused_still_has_files(tmp_path: Path) -> None:
    write_directory(tmp_path, SMALL, auto_map={"AutoModel": "modeling.Own"})
    done = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path), "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["can_be_served"], found["shape"]) == (1, False, None)
    assert "code of its own" in found["refused"]
    assert len(found["files"]) == 2
    assert "served        no: " in CliRunner().invoke(app, ["doctor", "--model", str(tmp_path)]).stdout


def test_names_of_files_forge_no_line(tmp_path: Path) -> None:
    write_directory(tmp_path, SMALL)
    (tmp_path / "x\nserved        yes\x1b[31m.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "\x1b[31m\ud800\n.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = CliRunner().invoke(app, ["doctor", "--model", str(tmp_path)], color=True)
    assert done.exit_code == 1
    assert "\x1b" not in done.stdout and "served        yes\n" not in done.stdout
    assert r"  x\nserved        yes\x1b[31m.safetensors " in done.stdout
    assert r"\x1b[31m\ud800\n.safetensors: the file is missing" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "revision", "sentence"),
    [
        ("org/none", None, "org/none at main is not in .*: kvproof serve fetches it"),
        ("org/none@v2", "v3", "org/none at v3 is not in"),
        ("default", None, "is not in .*models: kvproof generate fetches it"),
        ("nothing", None, "there is no file or folder 'nothing'"),
        ("nothing", "v1", "a revision is that of a model on the hub"),
    ],
)
def test_nothing_is_fetched_to_be_looked_at(model: str, revision: str | None, sentence: str) -> None:
    with pytest.raises(ModelUnavailable, match=sentence):
        inspect_model(model, revision)
