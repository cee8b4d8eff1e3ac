"""`megloom versions`: what it prints, what it does, and how it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megloom.cli import main
from megloom.compute.conductor.run import RunPaths
from tests.compute.conductor.test_rollback import live
from tests.compute.state.weight_versions import put_line
from tests.kills.life import RUN


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    home = tmp_path_factory.mktemp("home")
    assert live(home, 3).failure is None
    return home


@pytest.fixture(scope="module")
def weights_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without steps, whose policy has real weights: three versions, the first of them whole."""
    home = tmp_path_factory.mktemp("weights")
    paths = RunPaths(home=home, run="w")
    paths.config.parent.mkdir(parents=True)
    paths.config.write_text(json.dumps({"workload": "a.b:c", "run": "w", "steps": 1}))
    put_line(Path(paths.weights("solver")), 3)
    return home


def call(capsys: pytest.CaptureFixture[str], home: Path, *words: str) -> tuple[int, str, str]:
    code = main(["versions", *words, "--home", str(home)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_list_has_a_row_for_each_version(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, home, "list", RUN, "solver")
    head, *rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert head == [
        "policy",
        "version",
        "parent",
        "step",
        "kind",
        "stored",
        "size_mb",
        "pinned",
        "committed",
    ]
    assert rows[0] == ["solver", "0", "0", "initial", "whole", "0.0"]
    assert rows[-1] == ["solver", "3", "2", "3", "train", "whole", "0.0", "yes"] and len(rows) == 4
    _, out, _ = call(capsys, home, "list", RUN, "--json")
    found = json.loads(out)
    assert {row["policy"] for row in found} == {"planner", "solver", "verifier"}
    assert [row["version"] for row in found if row["policy"] == "solver" and row["committed"]] == [3]


def test_deltas_pins_and_sizes_are_listed(weights_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, weights_home, "pin", "w", "solver", "1") == (0, "pinned solver@1\n", "")
    _, out, _ = call(capsys, weights_home, "list", "w", "--json")
    rows = json.loads(out)
    assert [row["stored"] for row in rows] == ["whole", "delta of 0", "delta of 0"]
    assert [row["pinned"] for row in rows] == [False, True, False]
    assert rows[1]["size_mb"] < 0.2 * rows[0]["size_mb"]
    assert call(capsys, weights_home, "unpin", "w", "solver", "1")[1] == "unpinned solver@1\n"
    assert call(capsys, weights_home, "unpin", "w", "solver", "1")[1] == "solver@1 was not pinned\n"


def test_show_has_the_manifest_and_who_made_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, home, "show", RUN, "solver", "last", "--json")
    shown = json.loads(out)
    assert shown["manifest"]["version"] == 3 and shown["manifest"]["parent_version"] == 2
    assert shown["made_by"]["num_samples"] > 0 and shown["made_by"]["config_hash"]
    _, out, _ = call(capsys, home, "show", RUN, "solver", "2")
    assert "manifest:\n" in out and "made_by:\n" in out and "uri: " in out


def test_an_export_is_written_and_told(
    weights_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ("export", "w", "solver", "2", "--out", str(out))
    code, told, _ = call(capsys, weights_home, *words, "--dtype", "bfloat16")
    assert code == 0 and told.startswith("export policy=solver version=2 bytes=")
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    code, _, error = call(capsys, weights_home, *words)
    assert code == 2 and "exists already" in error


def test_a_rollback_without_a_service_is_done_here(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "home"
    shutil.copytree(home, copy)
    code, out, _ = call(capsys, copy, "rollback", RUN, "solver", "1")
    assert code == 0
    assert out == (
        f"rollback run={RUN} policy=solver from=3 to=1 step=4 with fresh moments (no state of it is kept)\n"
    )
    _, out, _ = call(capsys, copy, "list", RUN, "solver", "--json")
    assert [row["version"] for row in json.loads(out) if row["committed"]] == [1]
    code, _, error = call(capsys, copy, "rollback", RUN, "solver", "1")
    assert code == 2 and "cannot roll back to version 1" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("list", "nope"), f"no run 'nope' in .*known: {RUN}"),
        (("list", RUN, "slover"), "has no policy 'slover' .it has planner, solver, verifier.*solver"),
        (
            ("show", RUN, "solver", "17"),
            "has no version 17 of solver on the disk .nearest: 3; see: meg",
        ),
        (("pin", RUN, "solver", "17"), "has no version 17"),
        (("rollback", RUN, "solver", "17"), "has no version 17"),
        (("rollback", "../x", "solver", "1"), "no run '../x'"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    import re

    code, out, error = call(capsys, home, *words)
    assert code == 2 and out == "" and re.search(message, error), error
    assert error.count("\n") == 1


def test_a_version_is_a_number(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call(capsys, home, "show", RUN, "solver", "newest")
    assert "expected a number, or last" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGLOOM_SCRATCH", str(tmp_path / "scratch"))
