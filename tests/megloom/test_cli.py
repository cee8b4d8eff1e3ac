"""The command line: help, and one clear line with exit code 2 for anything wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megloom.cli import main
from megloom.systems import known_systems, resolve_system


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a refused command prints."""
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize("command", [[], ["demo"], ["train"], ["lineage"], ["lineage", "version"], ["ui"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0 and "usage: megloom" in capsys.readouterr().out


def test_an_unknown_pipeline_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "train", "arithmetic_taem", "--steps", "1", "--run", "x")
    assert "did you mean 'arithmetic_team'" in line


def test_an_unknown_setting_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(
        capsys, "train", "arithmetic_team", "--steps", "1", "--run", "x", "--set", "training.groupsize=8"
    )
    assert "unknown key 'training.groupsize', did you mean 'group_size'" in line


def test_lag_without_a_correction_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lagging_system.py").write_text(
        "from megloom.pipelines.systems import arithmetic_team as team\n"
        "from megloom.compute.workload import Policy\n"
        "solver = team.workload.policies['solver']\n"
        "Policy(**{**dict(solver), 'max_off_policy_steps': 2})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    line = refused(capsys, "train", "lagging_system:workload", "--steps", "1", "--run", "x")
    assert "lagging_system.py:4: Policy: max_off_policy_steps 2 without a correction: " in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train", "arithmetic_team", "--run", "x"], "--steps"),
        (["train", "arithmetic_team", "--steps", "many", "--run", "x"], "invalid int value: 'many'"),
        (["train", "arithmetic_team", "--steps", "1", "--run", "a/b"], "run: "),
        (["train", "arithmetic_team", "--steps", "1", "--run", "x", "--set", "seed"], "expected key=value"),
        (["lineage", "version", "solver", "--run", "x"], "<policy>@<number>"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *argv)


def test_lineage_of_an_unknown_run_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "lineage", "version", "solver@last", "--run", "nobody", "--home", str(tmp_path))
    assert "nobody" in line


def test_status_and_down_without_a_service_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--home", str(tmp_path)]) == 1
    assert main(["down", "--home", str(tmp_path)]) == 0
    assert "no service" in capsys.readouterr().out


def test_short_and_full_names_resolve() -> None:
    assert "arithmetic_team" in known_systems()
    full = "megloom.pipelines.systems.arithmetic_team:workload"
    assert resolve_system("arithmetic_team") == resolve_system(full) == full
