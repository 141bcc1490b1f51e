"""What the front end costs is measured over HTTP, and counted right."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimized.bench_server import InstantDevice, bench_server
from optimized.cli import app
from optimized.device import Sampled
from optimized.plan import Plan
from tests.models.tiny_files import write_gguf


@pytest.mark.slow
def test_bench_server_counts_every_token_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path))
    write_gguf(tmp_path / "tiny.gguf")
    options = ["--connections", "4", "--tokens", "50", "--idle", "20", "--json"]
    done = CliRunner().invoke(app, ["bench", "server", "--model", str(tmp_path / "tiny.gguf"), *options])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["num_connections"], facts["num_idle"]) == (4, 20)
    assert all(facts[name] > 0 for name in ("tokens_per_s", "cpu_us_per_token", "first_token_ms"))
    assert facts["tokens_per_event_lagging"] > 2  # who lags gets several in one event
    assert facts["idle_mib"] < 20
    refused = CliRunner().invoke(app, ["bench", "server", "--connections", "0"])
    assert (refused.exit_code, refused.stderr) == (2, "connections is 0, it must be from 1 to 1000\n")


@pytest.mark.slow
def test_bench_server_ends_where_its_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callers would wait for ever, if somebody made the engine anew that dies each time."""

    def broken(self: InstantDevice, plan: Plan) -> list[Sampled]:
        raise RuntimeError("no device")

    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path))
    monkeypatch.setattr(InstantDevice, "run", broken)
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(RuntimeError, match="a caller failed: ConnectionError: the server answered"):
        bench_server(str(tmp_path / "tiny.gguf"), 1, 2, 1)
