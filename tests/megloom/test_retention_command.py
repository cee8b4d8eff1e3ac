"""`megloom retention` says what it would drop, and drops it only with --yes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megloom.cli import main
from megloom.compute.store.dropped import read_dropped
from megloom.compute.store.files import Folder

OLD = Path(__file__).parents[1] / "data" / "meg_v1"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run of three steps; each made a version of every policy."""
    return shutil.copytree(OLD, tmp_path / "store")


def token_files(store: Path) -> list[str]:
    return sorted(path.parent.name for path in store.glob("meg/old/*/segments*.parquet"))


def run(store: Path, *argv: str) -> int:
    return main(["retention", "--run", "old", "--store", str(store), *argv])


def test_without_yes_it_reports_and_touches_nothing(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    sizes = sum((store / f"meg/old/step=00000{step}/segments.parquet").stat().st_size for step in (0, 1))
    assert run(store, "--keep-tokens", "1") == 0
    out = capsys.readouterr().out
    assert f"could drop the tokens and messages of 2 steps (0..1), files=2 bytes={sizes}" in out
    assert "--yes" in out
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


def test_with_yes_it_drops_them_and_a_second_time_there_is_nothing_left(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, "--keep-tokens", "2", "--yes") == 0
    assert token_files(store) == ["step=000001", "step=000002"]
    mark = read_dropped(Folder(str(store)), "old", 0)
    assert mark is not None and mark.tables == ("messages", "segments") and mark.at.endswith("+00:00")
    capsys.readouterr()
    assert run(store, "--keep-tokens", "2", "--yes") == 0
    assert "of 0 steps" in capsys.readouterr().out


def test_an_export_of_dropped_tokens_says_which_step_and_what_to_do(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(store, "--keep-tokens", "1", "--yes")
    capsys.readouterr()
    argv = ["export", "--run", "old", "--store", str(store), "--out", str(tmp_path / "out.jsonl"), "--tokens"]
    assert main([*argv, "--purpose", "all"]) == 2
    line = capsys.readouterr().err
    assert "step 0: segments were dropped" in line and "newest 1 versions" in line
    assert "export without --tokens, or later --steps" in line
    assert main([*argv, "--steps", "2:"]) == 0


def test_keeping_nothing_and_unknown_runs_are_refused(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, "--keep-tokens", "0", "--yes") == 2
    assert "keep the tokens of at least 1 version, got 0" in capsys.readouterr().err
    assert main(["retention", "--run", "x", "--store", str(store), "--keep-tokens", "1"]) == 2
    assert "run x: no sealed step" in capsys.readouterr().err
    assert len(token_files(store)) == 3
