"""The coding system's tasks: a small repository with one wrong line, and a grader that keeps its tests apart.

A task is a function whose line adds where it should multiply, say. The agent gets the repository and the
issue; the tests exist only in the grader, which runs the repaired code in a fresh directory without a
network, asks it for values, and compares them here: the code under test never sees what is expected.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megloom.compute.rollout.harness import run_alone
from megloom.compute.workload import Demonstration, HarnessResult, ProgramLimits

FILE = "shop.py"
NAMES = ("price", "total", "change", "weight", "score", "speed", "count", "level")
ARGUMENTS = ("a", "b", "n", "x")
OPERATORS = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}
WRONG = ("+", "-")  # a star in the wrong line would have to be escaped in the pattern of a repair
NUMBERS = tuple(range(2, 10))
INPUTS = (-7, 0, 1, 4, 25)
NUM_TRAIN, NUM_HELD_OUT = 200, 50
TRAIN_SEED, HELD_OUT_SEED = 11, 12
GRADE_S = 10.0
GRADE_TRIES, GRADE_PAUSE_S = 3, 0.5  # of a grader without a verdict; a machine that is full needs a moment
GRADER_LIMITS = ProgramLimits(
    disk_bytes=1 << 20,
    file_bytes=1 << 20,
    memory_bytes=512 << 20,
    cpu_s=2,
    output_bytes=8192,
    grace_s=0.1,
    network="closed_if_possible",
)
BEGUN = "the grader has begun"  # its first line, printed before any code under test runs
ASK = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("repaired", sys.argv[1])
module = importlib.util.module_from_spec(spec)
values = json.loads(sys.argv[3])
print({BEGUN!r}, flush=True)
spec.loader.exec_module(module)
function = getattr(module, sys.argv[2])
print()
print(json.dumps([function(value) for value in values]))
"""
SUBMIT = "$ echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
WRONG_REPAIR = 0.4  # of the teacher's repairs: imitation alone must leave something to learn


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """`name` returns `argument wrong number` and should return `argument right number`."""

    name: str
    argument: str
    number: int
    wrong: str
    right: str

    @property
    def issue(self) -> str:
        """What the agent is told."""
        return f"{self.name} returns {self._line(self.wrong)} should be {self._line(self.right)}"

    @property
    def files(self) -> dict[str, str]:
        """The repository."""
        return {FILE: f"def {self.name}({self.argument}):\n    return {self._line(self.wrong)}\n"}

    @property
    def expected(self) -> list[int]:
        return [OPERATORS[self.right](value, self.number) for value in INPUTS]

    def repair(self, operator: str) -> str:
        """The command that puts `operator` into the wrong line."""
        return f"$ sed -i 's/{self._line(self.wrong)}/{self._line(operator)}/' {FILE}"

    def _line(self, operator: str) -> str:
        return f"{self.argument} {operator} {self.number}"


def bug_of(row: Mapping[str, Any]) -> Bug:
    """The bug of a dataset row."""
    return Bug(**row["extra_info"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """`works` says that the file answered at all; `passed` is the share of the hidden tests."""

    works: bool
    passed: float


class GraderError(Exception):
    """The grader came to no verdict: nothing is known of the code, which is not the same as wrong code."""


async def grade(bug: Bug, code: bytes | None) -> Grade:
    """Runs the hidden tests on a file; one that is missing, broken or too slow passes none.

    A grader that did not begin is tried again, and so is the first that ran out of time: the machine may have
    been busy. The caller's deadline bounds all of it. Raises: GraderError if no try came to a verdict.
    """
    if code is None:
        return Grade(works=False, passed=0.0)
    was_slow, failure = False, ""
    for attempt in range(GRADE_TRIES):
        await asyncio.sleep(attempt * GRADE_PAUSE_S)
        try:
            result = await _ask(bug, code)
        except OSError as error:  # no process, no file, no space
            failure = f"{type(error).__name__}: {error}"
            continue
        if not _has_begun(result):
            failure = _why_not_begun(result)
        elif result.timed_out and not was_slow:
            was_slow, failure = True, f"no answer within {GRADE_S:g} s"
        else:
            return _verdict(bug, result)
    raise GraderError(f"no verdict on {bug.name} in {GRADE_TRIES} tries, the last: {failure}")


async def _ask(bug: Bug, code: bytes) -> HarnessResult:
    program = (sys.executable, "-I", "-S", "ask.py", FILE, bug.name, json.dumps(INPUTS))
    return await run_alone(
        program, files={FILE: code, "ask.py": ASK}, timeout_s=GRADE_S, limits=GRADER_LIMITS, keep=()
    )


def _has_begun(result: HarnessResult) -> bool:
    """Whether what happened is the doing of the code under test, which can take the first line from nobody.

    A file too large for the grader's disk is, too: it may be stopped for that before it begins.
    """
    return result.over_disk or result.output.startswith(f"{BEGUN}\n")


def _why_not_begun(result: HarnessResult) -> str:
    how = f"not within {GRADE_S:g} s" if result.timed_out else f"exit status {result.exit_code}"
    return f"it did not begin, {how}: {result.output.strip()[-200:] or 'it said nothing'}"


def _verdict(bug: Bug, result: HarnessResult) -> Grade:
    """What a grader that has begun says of the code."""
    is_whole = result.exit_code == 0 and not result.timed_out and not result.over_disk
    answers = _answers(result.output) if is_whole else []
    works = len(answers) == len(INPUTS)
    right = [type(own) is int and own == told for own, told in zip(answers, bug.expected, strict=False)]
    return Grade(works=works, passed=sum(right) / len(INPUTS) if works else 0.0)


def train_rows() -> list[dict[str, Any]]:
    """The training set."""
    held_out = {row["prompt"] for row in held_out_rows()}
    return _rows(NUM_TRAIN, TRAIN_SEED, avoid=held_out)


def held_out_rows() -> list[dict[str, Any]]:
    """The held-out set; shares no task with the training set."""
    return _rows(NUM_HELD_OUT, HELD_OUT_SEED, avoid=set())


def teach(num: int, seed: int) -> Iterator[Demonstration]:
    """`num` answers of a careless teacher on training tasks: a repair, and how to hand in."""
    dice = random.Random(seed)
    bugs = [bug_of(row) for row in train_rows()]
    for position in range(num):
        bug = dice.choice(bugs)
        is_wrong = dice.random() < WRONG_REPAIR
        repair = bug.repair(dice.choice(sorted(OPERATORS)) if is_wrong else bug.right)
        if position % 2:
            yield Demonstration(agent="coder", arguments=(bug.issue, repair, "exit 0"), answer=SUBMIT)
        else:
            yield Demonstration(agent="coder", arguments=(bug.issue,), answer=repair)


def _rows(num: int, seed: int, avoid: set[str]) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < num:
        wrong = dice.choice(WRONG)
        bug: dict[str, Any] = {
            "name": dice.choice(NAMES),
            "argument": dice.choice(ARGUMENTS),
            "number": dice.choice(NUMBERS),
            "wrong": wrong,
            "right": dice.choice([operator for operator in sorted(OPERATORS) if operator != wrong]),
        }
        issue = Bug(**bug).issue
        if issue not in avoid and issue not in rows:
            rows[issue] = {
                "prompt": issue,
                "answer": bug["right"],
                "data_source": "megloom/one_wrong_line",
                "extra_info": bug,
            }
    return list(rows.values())


def _answers(output: str) -> list[Any]:
    """The values in the last line of what the code under test printed."""
    try:
        found = json.loads(output.rstrip("\n").rpartition("\n")[2])
    except ValueError:
        return []
    return found if isinstance(found, list) else []
