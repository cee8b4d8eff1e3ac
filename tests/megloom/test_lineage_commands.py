"""`megloom lineage …` on a small store, and one clear line with exit code 2 for anything wrong."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megloom.cli import main

STORE = str(Path(__file__).parents[1] / "data" / "meg_v1")
SAMPLE = "g000001-0000-m000-a0-i001-s"


def asked(capsys: pytest.CaptureFixture[str], *argv: str, store: str = STORE) -> str:
    """What the question prints."""
    assert main(["lineage", *argv, "--run", "old", "--store", store]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *argv: str, run: str = "old") -> str:
    """The one line that a refused question prints."""
    try:
        code = main(["lineage", *argv, "--run", run, "--store", STORE])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["version", "solver@last"], "all versions behind it (6)"),
        (["task", "train000001"], "influenced 4 of 7 versions: 2 directly"),
        (["reward", "9364eda117730385"], "directly, by their samples (4)"),
        (["diff", "solver@1", "solver@2"], "between solver@1 and solver@2, 1 hop apart (0)"),
        (["path", SAMPLE, "verifier@2"], "→ verifier@2  it answered 6 calls of the samples' episodes"),
        (["path", SAMPLE, "solver@0"], f"no way from sample {SAMPLE} to solver@0"),
    ],
)
def test_each_question_has_an_answer_that_tells_the_files_it_took(
    argv: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = asked(capsys, *argv)
    assert part in text
    assert "of 37 files opened" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["version", "solver@last"], "ancestors"),
        (["task", "train000001"], "reached"),
        (["diff", "solver@1", "solver@2"], "between"),
        (["path", SAMPLE, "verifier@2"], "hops"),
    ],
)
def test_json_holds_all_of_it(argv: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(asked(capsys, *argv, "--json"))[key]


def test_rows_bounds_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = asked(capsys, "version", "solver@last", "--rows", "2")
    assert "largest advantages (12)" in text and "  … 10 more" in text


def test_an_episode_is_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = asked(capsys, "episode", SAMPLE)
    assert "calls (5)" in text and text.endswith("picture: g000001-0000-m000.svg\n")
    assert ElementTree.parse("g000001-0000-m000.svg").getroot().tag.endswith("svg")
    answer = json.loads(asked(capsys, "episode", "g000001-0000-m000", "--svg", "other.svg", "--json"))
    assert len(answer["calls"]) == 5 and Path("other.svg").exists()


def test_sql_prints_rows_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    query = "select agent, count(*) as n from invocations group by 1 order by 1"
    assert asked(capsys, "sql", query, "--verify").splitlines() == [
        "agent     n",
        "planner   24",
        "solver    72",
        "verifier  24",
    ]
    assert json.loads(asked(capsys, "sql", query, "--json"))[1] == {"agent": "solver", "n": 72}
    cut = asked(capsys, "sql", query, "--rows", "1").splitlines()
    assert cut[-1] == "… 2 more rows (--rows N shows more, --json all)"


def test_a_wrong_query_is_two_lines_with_the_views(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lineage", "sql", "select * from invocation", "--run", "old", "--store", STORE]) == 2
    message, views = capsys.readouterr().err.splitlines()
    assert message.startswith("megloom: Catalog Error: ") and "invocations" in views.split(", ")


def test_views_writes_a_new_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "run.duckdb")
    assert "invocations_solver" in asked(capsys, "views", path)
    assert "run.duckdb exists" in refused(capsys, "views", path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["version", "solvr@1"], "did you mean 'solver'"),
        (["version", "solver@9"], "there: versions 0 to 2"),
        (["version", "solver"], "<policy>@<number>"),
        (["task", "train00000x"], "did you mean 'train00000"),
        (["reward", "9364eda117730386"], "did you mean '9364eda117730385'"),
        (["diff", "solver@1", "verifer@1"], "did you mean 'verifier'"),
        (
            ["path", "g000001-0000-m009-a0-i000-s", "solver@1"],
            "no sample g000001-0000-m009-a0-i000-s in step 1",
        ),
        (["episode", "g000001-0000-m007"], "did you mean 'g000001-0000-m00"),
        (["sql", "select 1; select 2"], "expected one SELECT, got SELECT, SELECT"),
        (["version", "solver@1", "--rows", "0"], "1 or more"),
        (["vresion", "solver@1"], "invalid choice"),
    ],
)
def test_bad_names_are_one_line_with_the_nearest(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *argv)


def test_an_unknown_run_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "run odl has no sealed step, did you mean 'old'" in refused(capsys, "version", "a@1", run="odl")


def test_a_damaged_store_is_one_line_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "meg" / "old" / "step=000000" / "manifest.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{}")
    assert main(["lineage", "version", "a@1", "--run", "old", "--store", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "megloom: meg/old/step=000000/manifest.json: not a manifest ('manifest')\n"
    )
