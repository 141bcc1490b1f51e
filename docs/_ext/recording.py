"""Under what a recorded figure stands: the command that made it, the commit and the day."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]


def made_by(command: str) -> dict[str, str]:
    """The beginning of a record of what this command says."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    return {"command": command, "commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
