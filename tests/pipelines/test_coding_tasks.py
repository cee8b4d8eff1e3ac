"""The coding tasks: one wrong line each, graded where the code under test cannot see what is expected."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from megloom.compute.rollout.chat import Chat
from megloom.compute.trainers.tokenizer import write_tokenizer
from megloom.pipelines.systems.coding_harness import MODEL, prompt
from megloom.pipelines.systems.coding_tasks import (
    FILE,
    INPUTS,
    SUBMIT,
    Bug,
    Grade,
    bug_of,
    grade,
    held_out_rows,
    teach,
    train_rows,
)

BUG = Bug(name="price", argument="a", number=3, wrong="+", right="*")


def graded(code: str | None) -> Grade:
    return asyncio.run(grade(BUG, None if code is None else code.encode()))


def function(body: str) -> str:
    return f"def price(a):\n    {body}\n"


def test_the_same_tasks_are_made_every_time_and_none_is_both_taught_and_tested() -> None:
    train, held_out = train_rows(), held_out_rows()
    assert train == train_rows() and held_out == held_out_rows()
    assert len({row["prompt"] for row in train}) == 200 and len({row["prompt"] for row in held_out}) == 50
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_a_task_says_what_is_wrong_and_its_repository_has_it() -> None:
    assert BUG.issue == "price returns a + 3 should be a * 3"
    assert BUG.files == {FILE: function("return a + 3")}
    assert (
        bug_of({"extra_info": {"name": "price", "argument": "a", "number": 3, "wrong": "+", "right": "*"}})
        == BUG
    )


@pytest.mark.parametrize("row", train_rows()[:20], ids=lambda row: row["prompt"])
def test_the_right_command_repairs_the_repository_as_a_shell_runs_it(
    row: dict[str, object], tmp_path: Path
) -> None:
    bug = bug_of(row)
    (tmp_path / FILE).write_text(bug.files[FILE])
    subprocess.run(bug.repair(bug.right).removeprefix("$ "), shell=True, cwd=tmp_path, check=True)
    scope: dict[str, object] = {}
    exec((tmp_path / FILE).read_text(), scope)
    repaired = scope[bug.name]
    assert callable(repaired) and [repaired(value) for value in INPUTS] == bug.expected


def test_a_repaired_file_passes_and_the_broken_one_does_not() -> None:
    assert graded(function("return a * 3")) == Grade(works=True, passed=1.0)
    assert graded(BUG.files[FILE]).passed < 1.0


@pytest.mark.parametrize(
    "code",
    [
        None,
        "",
        "def price(a",
        function("raise ValueError"),
        function("return a * 3.0"),
        "import os; os._exit(0)",
        "import os; os._exit(126)",
        "import os; print('guardian: not started: no', flush=True); os._exit(125)",
        "import os; os.kill(os.getppid(), 9)",
        pytest.param(f"'{'x' * (2 << 20)}'", id="larger than the grader's disk"),
        "import sys; sys.exit(0)",
        function("while True: pass"),
        "print('[1, 1, 1, 1, 1]')",
    ],
)
def test_nothing_but_right_answers_passes(code: str | None) -> None:
    assert graded(code).passed == 0.0


def test_code_under_test_finds_no_test_and_no_secret() -> None:
    code = """
import os, sys
assert set(os.listdir()) - {"__pycache__"} == {"ask.py", "shop.py"}
assert sys.argv[1:] == ["shop.py", "price", "[-7, 0, 1, 4, 25]"]
assert set(os.environ) <= {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE"}
def price(a):
    return a * 3
"""
    assert graded(code) == Grade(works=True, passed=1.0)


def test_the_teacher_is_careless_and_always_well_formed() -> None:
    shown = list(teach(400, seed=1))
    assert shown == list(teach(400, seed=1))
    repairs = [example.answer for example in shown if len(example.arguments) == 1]
    assert all(answer.startswith("$ sed -i 's/") for answer in repairs) and len(repairs) == 200
    assert {example.answer for example in shown if len(example.arguments) == 3} == {SUBMIT}
    right = {row["prompt"]: bug_of(row).repair(bug_of(row).right) for row in train_rows()}
    share = sum(
        right[example.arguments[0]] == example.answer for example in shown if len(example.arguments) == 1
    )
    assert 100 < share < 190, "a third to a half of a wrong draw is right by chance"


def test_every_text_of_these_tasks_survives_the_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(MODEL.tokenizer, tmp_path)
    chat, unknown = Chat(tmp_path), MODEL.tokenizer.special.index("<unk>")
    for answer in {example.answer for example in teach(1000, seed=2)}:
        assert chat.decode(chat.encode_answer(answer)) == answer
    for row in train_rows() + held_out_rows():
        ids = chat.encode(prompt(row["prompt"], SUBMIT, "exit 0"))
        assert unknown not in ids and chat.decode(ids) == f"repair{row['prompt']}{SUBMIT}exit 0"


def test_a_demonstrated_answer_is_continued_as_a_sampled_one_is(tmp_path: Path) -> None:
    """The second prompt begins with the first, its answer and the stop token: one path of the token tree."""
    write_tokenizer(MODEL.tokenizer, tmp_path)
    chat, answer = Chat(tmp_path), BUG.repair("*")
    first = chat.encode(prompt(BUG.issue)) + chat.encode_answer(answer)
    assert chat.encode(prompt(BUG.issue, answer, "exit 0"))[: len(first)] == first
