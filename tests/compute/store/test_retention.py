"""Retention: tokens of old versions go, everything else stays; a crash is repaired by the next run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sealed_steps import seal_steps

from megloom.compute.graph.records import RECORDS, MessageRecord
from megloom.compute.store.dropped import DROPPED
from megloom.compute.store.errors import CorruptFile, TokensDropped
from megloom.compute.store.files import Folder
from megloom.compute.store.reader import MegReader
from megloom.compute.store.retention import TOKEN_TABLES, Plan, apply, plan_retention

Made = dict[int, dict[str, int]]  # by step: the version that it made of each policy


def records(build: Any, step: int, versions: dict[str, int]) -> list[Any]:
    message = MessageRecord(
        message_id=f"m{step}", episode_id="e", run="r", step=step, parent=None, role="user", content="{}"
    )
    own = {"step": step, "episode_id": f"e{step}"}
    return [
        build.segment(f"s{step}", **own),
        message,
        build.episode(f"e{step}", step=step),
        build.invocation(f"i{step}", **own),
        build.sample(f"x{step}", **own),
        *(build.version(policy, version, step=step) for policy, version in versions.items()),
    ]


def sealed(root: str, build: Any, made: Made) -> MegReader:
    seal_steps(root, {step: records(build, step, versions) for step, versions in made.items()})
    return MegReader(root)


def dropped_steps(plan: Plan) -> list[int]:
    return [step.step for step in plan.steps]


EVERY_STEP: Made = {step: {"solver": step} for step in range(6)}
TWO: Made = {0: {"a": 0, "b": 0}, 1: {"a": 1}, 2: {"b": 1}, 3: {"a": 2}, 4: {"a": 3}}
GAPS: Made = {0: {"a": 0}, 1: {}, 2: {"a": 1}, 3: {}, 4: {"a": 2}, 5: {}}
CASES: list[tuple[Made, int, list[int], int]] = [
    (EVERY_STEP, 1, [0, 1, 2, 3, 4], 5),
    (EVERY_STEP, 2, [0, 1, 2, 3], 4),
    (EVERY_STEP, 6, [], 0),
    (EVERY_STEP, 99, [], 0),
    ({0: {"solver": 0}}, 1, [], 0),
    # A step stays while it made a version that is new for any policy.
    (TWO, 2, [1], 0),
    (TWO, 1, [0, 1, 3], 2),
    # A policy that is never trained keeps nothing.
    ({0: {"a": 0, "frozen": 0}, 1: {"a": 1}, 2: {"a": 2}}, 1, [0, 1], 2),
    # A step that made no version goes with the one before it.
    (GAPS, 1, [0, 1, 2, 3], 4),
    (GAPS, 2, [0, 1], 2),
    ({0: {}, 1: {"a": 0}, 2: {"a": 1}, 3: {"a": 2}}, 1, [1, 2], 0),
]


@pytest.mark.parametrize(("made", "keep", "expected", "first_kept"), CASES)
def test_steps_go_when_all_that_they_made_is_older_than_the_newest_versions(
    tmp_path: Path, build: Any, made: Made, keep: int, expected: list[int], first_kept: int
) -> None:
    plan = plan_retention(sealed(str(tmp_path), build, made), "r", keep)
    assert (dropped_steps(plan), plan.first_kept) == (expected, first_kept)
    assert all(len(step.names) == len(TOKEN_TABLES) for step in plan.steps)


def test_dropping_removes_the_token_files_and_nothing_else(root: str, build: Any) -> None:
    reader = sealed(root, build, EVERY_STEP)
    others = [table for table in RECORDS if table not in TOKEN_TABLES]
    before = {table: reader.read_table("r", table) for table in others}
    manifest = reader.read_manifest("r", 0)
    plan = plan_retention(reader, "r", 2)
    sizes = {file.table: file.size_bytes for file in manifest.files}
    assert plan.steps[0].size_bytes == sizes["segments"] + sizes["messages"]
    apply(reader.folder, plan, at="2026-01-01T00:00:00Z")
    assert {table: reader.read_table("r", table) for table in others} == before
    assert reader.read_manifest("r", 0) == manifest
    for table in TOKEN_TABLES:
        assert reader.read_table("r", table, [4, 5]).num_rows == 2
        with pytest.raises(TokensDropped, match="newest 2 versions"):
            reader.read_table("r", table, [3])
    gone = {file.name for file in manifest.files if file.table in TOKEN_TABLES}
    assert gone.isdisjoint(reader.folder.names("meg/r/step=000000"))


def test_the_marker_names_the_tables_the_reason_and_the_time(root: str, build: Any) -> None:
    reader = sealed(root, build, EVERY_STEP)
    apply(reader.folder, plan_retention(reader, "r", 1), at="2026-01-01T00:00:00Z")
    assert json.loads(reader.folder.read(f"meg/r/step=000004/{DROPPED}")) == {
        "tables": ["messages", "segments"],
        "reason": "only the tokens of the newest 1 versions of each policy are kept",
        "at": "2026-01-01T00:00:00Z",
    }
    assert not reader.folder.exists(f"meg/r/step=000005/{DROPPED}")


def test_planning_changes_nothing_and_what_is_dropped_is_not_planned_again(root: str, build: Any) -> None:
    reader = sealed(root, build, EVERY_STEP)
    plan = plan_retention(reader, "r", 2)
    assert plan_retention(reader, "r", 2) == plan and plan.num_files == 8
    apply(reader.folder, plan, at="now")
    again = plan_retention(reader, "r", 2)
    assert (again.steps, again.num_files, again.size_bytes) == ((), 0, 0)
    assert dropped_steps(plan_retention(reader, "r", 1)) == [4]


class Interrupted(Exception):
    pass


class FailingFolder(Folder):
    """Fails instead of its k-th change."""

    def __init__(self, root: str, changes: int) -> None:
        super().__init__(root)
        self._left = changes

    def publish(self, path: str, data: bytes) -> None:
        self._change()
        super().publish(path, data)

    def remove(self, path: str) -> None:
        self._change()
        super().remove(path)

    def _change(self) -> None:
        if self._left == 0:
            raise Interrupted
        self._left -= 1


@pytest.mark.parametrize("changes", range(6))
def test_a_crash_at_any_point_is_finished_by_running_again(tmp_path: Path, build: Any, changes: int) -> None:
    root = str(tmp_path)
    reader = sealed(root, build, {step: {"solver": step} for step in range(3)})
    plan = plan_retention(reader, "r", 1)
    with pytest.raises(Interrupted):
        apply(FailingFolder(root, changes), plan, at="first")
    for step in (0, 1):  # meanwhile a reader gets the whole table or is told why not
        for table in TOKEN_TABLES:
            try:
                assert reader.read_table("r", table, [step]).num_rows == 1
            except TokensDropped as error:
                assert "newest 1 versions" in str(error)
    rest = plan_retention(reader, "r", 1)
    assert 0 < rest.num_files <= plan.num_files
    apply(Folder(root), rest, at="second")
    assert plan_retention(reader, "r", 1).steps == ()
    for planned in plan.steps:
        assert set(planned.names).isdisjoint(Folder(root).names(f"meg/r/step={planned.step:06d}"))


def test_dropping_after_every_step_drops_what_one_plan_at_the_end_does(tmp_path: Path, build: Any) -> None:
    made: Made = {0: {"a": 0, "b": 0}, 1: {"a": 1}, 2: {"b": 1}, 3: {"a": 2}, 4: {}, 5: {"a": 3, "b": 2}}
    reader = MegReader(str(tmp_path))
    first_step, seen = 0, []
    for step, versions in made.items():
        seal_steps(str(tmp_path), {step: records(build, step, versions)})
        plan = plan_retention(reader, "r", 1, first_step=first_step)
        apply(reader.folder, plan, at="now")
        assert plan_retention(reader, "r", 1).steps == ()
        assert plan.first_kept is not None
        first_step = plan.first_kept
        seen += dropped_steps(plan)
    assert sorted(seen) == [0, 1, 2, 3, 4] and first_step == 5


def test_at_least_one_version_is_kept_and_an_unknown_run_is_named(tmp_path: Path, build: Any) -> None:
    reader = sealed(str(tmp_path), build, EVERY_STEP)
    with pytest.raises(ValueError, match="run r: keep the tokens of at least 1 version, got 0"):
        plan_retention(reader, "r", 0)
    with pytest.raises(FileNotFoundError, match=r"run x: no sealed step from 0 on \(runs here: r\)"):
        plan_retention(reader, "x", 1)


def test_a_damaged_marker_is_named(tmp_path: Path, build: Any) -> None:
    reader = sealed(str(tmp_path), build, EVERY_STEP)
    reader.folder.write(f"meg/r/step=000000/{DROPPED}", b"[]")
    with pytest.raises(CorruptFile, match=r"step=000000/dropped\.json: not a mark of dropped"):
        plan_retention(reader, "r", 1)
