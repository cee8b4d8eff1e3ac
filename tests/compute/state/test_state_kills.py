"""SIGKILL at any change of the disk: an object is whole or not there, what was acknowledged stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def kill_lives(folder: Path, *, seed: int, first: int, step: int) -> dict[str, int]:
    arguments = [
        sys.executable,
        "-m",
        "tests.compute.state.state_life",
        str(folder),
        str(seed),
        str(first),
        str(step),
    ]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{seed=} {first=} {step=}: {done.stderr[-3000:]}"
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_a_store_that_is_killed_here_and_there_keeps_its_promises(tmp_path: Path) -> None:
    found = kill_lives(tmp_path, seed=3, first=5, step=17)
    assert found["kills"] >= 10, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_is_killed_at_every_operation_keeps_its_promises(tmp_path: Path, seed: int) -> None:
    found = kill_lives(tmp_path, seed=seed, first=0, step=1)
    assert found["kills"] >= 150, found
