"""What ``/openapi.json`` says is what the server does: no answer of 500 or more, no status and no shape that is not written there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import RunningServer

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SOAK = os.environ.get("KVPROOF_TIER") == "soak"
EXAMPLES = 1000 if SOAK else 100
"""For each operation, besides what the coverage phase derives from the schema."""


@pytest.mark.slow
@pytest.mark.timeout(0 if SOAK else 600)
@pytest.mark.parametrize("phases", ["examples,coverage", "fuzzing", "stateful"])
def test_the_server_does_what_its_schema_says(server: RunningServer, tmp_path: Path, phases: str) -> None:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run"]
    command += [f"http://127.0.0.1:{server.port}/openapi.json", "--phases", phases, "--checks", CHECKS]
    command += ["--max-examples", str(EXAMPLES), "--seed", "1", "--no-color", "--generation-database", "none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    tested = re.search(r"Tested: (\d+)", done.stdout)
    # Only answers that name something else lead on from one operation to another: a model's name does.
    num_paths = 2 if phases == "stateful" else len(server.ask("GET", "/openapi.json").json["paths"])
    assert tested is not None and int(tested[1]) == num_paths, done.stdout
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases is not None and cases[1] == cases[2] and int(cases[1]) > EXAMPLES // 2, done.stdout
    phase = phases.rpartition(",")[2].capitalize()
    assert re.search(rf"✅ {phase}\b", done.stdout), done.stdout
