"""`megloom export` and its file, on a store that an older version wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megloom.cli import main
from megloom.export_command import parse_steps

OLD = Path(__file__).parents[1] / "data" / "meg_v1"


def exported(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """What a successful export prints."""
    assert main(["export", "--run", "old", "--store", str(OLD), *argv]) == 0
    return capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["export", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    return captured.err


def test_jsonl_and_parquet_hold_the_same_rows_and_the_command_says_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("out.jsonl", "out.parquet"):
        path = tmp_path / name
        out, err = exported(capsys, "--purpose", "all", "--tokens", "--out", str(path))
        rows = (
            [json.loads(line) for line in path.read_text().splitlines()]
            if name == "out.jsonl"
            else pq.read_table(path).to_pylist()
        )
        assert out == f"export rows={len(rows)} bytes={path.stat().st_size} path={path}\n"
        assert err.count("\n") == 1 and "schema 1" in err
        ids = [row["invocation_id"] for row in rows]
        assert len(set(ids)) == len(ids) > 0
        assert {row["step"] for row in rows} == {0, 1, 2}
        assert {len(row["token_ids"]) - len(row["loss_mask"]) for row in rows} == {0}


def test_the_default_file_is_named_after_the_run_and_holds_training_calls_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exported(capsys, "--agent", "solver", "--steps", "1:1")
    rows = [json.loads(line) for line in Path("old.jsonl").read_text().splitlines()]
    assert {(row["agent"], row["step"], row["purpose"]) for row in rows} == {("solver", 1, "train")}
    exported(capsys, "--format", "parquet")
    assert pq.read_table("old.parquet").num_rows > len(rows)


def test_wrong_names_and_numbers_are_one_clear_line_and_leave_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--store", str(OLD), "--out", str(tmp_path / "out.jsonl"))
    assert "run nobody: no sealed step (runs here: old)" in refused(capsys, "--run", "nobody", *place)
    assert "no agent 'solvr'" in refused(
        capsys, "--run", "old", "--agent", "solvr", "--purpose", "eval", *place
    ).replace("\n", " ")
    assert "--steps 2:1: the first step is after" in refused(capsys, "--run", "old", "--steps", "2:1", *place)
    assert "no sealed step in 7:9" in refused(capsys, "--run", "old", "--steps", "7:9", *place)
    assert "is a folder" in refused(capsys, "--run", "old", "--store", str(OLD), "--out", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_one_clear_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(OLD, store)
    damaged = store / "meg" / "old" / "step=000001" / "invocations-solver.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    line = refused(
        capsys, "--run", "old", "--store", str(store), "--steps", "1", "--out", str(tmp_path / "o.jsonl")
    )
    assert "invocations-solver.parquet: digest" in line


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        (None, (None, None)),
        ("3:7", (3, 7)),
        ("3:", (3, None)),
        (":7", (None, 7)),
        ("5", (5, 5)),
        (":", (None, None)),
    ],
)
def test_steps_are_a_range_with_both_ends_or_one_step(
    text: str | None, bounds: tuple[int | None, int | None]
) -> None:
    assert parse_steps(text) == bounds


@pytest.mark.parametrize("text", ["", "a", "1-3", "1:b", "-1", "1:2:3"])
def test_other_forms_of_steps_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected A:B, A:, :B or a step"):
        parse_steps(text)


@pytest.mark.parametrize("command", ["export", "retention"])
def test_both_commands_have_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0 and f"usage: megloom {command}" in capsys.readouterr().out
