from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.graph.records import ProvenanceRecord
from megloom.compute.store.lineage.backward import Ancestor, DirectSample, TaskUse, VersionLineage
from megloom.compute.store.lineage.text import lineage_json, lineage_text
from megloom.compute.store.lineage.versions import VersionEdge


def sample(sample_id: str, advantage: float, **overrides: Any) -> DirectSample:
    values: dict[str, Any] = {
        "step": 2,
        "kind": "rollout",
        "agent": "solver",
        "task_id": "t2",
        "episode_id": "e2",
    }
    sampled: dict[str, Any] = {
        "invocation_id": "s3",
        "reward": None,
        "sampled_by_min": 0,
        "sampled_by_max": 1,
    }
    return DirectSample(sample_id=sample_id, advantage=advantage, **(values | sampled | overrides))


@pytest.fixture
def lineage(build: Any) -> VersionLineage:
    return VersionLineage(
        row=build.version("solver", 2, step=2),
        provenance=ProvenanceRecord(
            run="r",
            epoch=3,
            step=2,
            workload="a.long.package.name.of.a.user:workload",
            config_hash="c" * 16,
            config="{}",
            code_hash="k" * 16,
            code_hashes='{"one.py": "1", "two.py": "2"}',
            reward_hash="h",
            packages=json.dumps({f"package-{n}": "1.20.300" for n in range(9)}),
            started_at="2026-01-01T00:00:00Z",
        ),
        num_files_opened=7,
        num_files=90,
        micro_batches=(build.micro_batch("ms3", step=2, base_version=1, sample_ids=["x1", "x2", "x3"]),),
        samples=(sample("x1", 0.1), sample("x2", -0.9), sample("x3", 0.5, sampled_by_max=0)),
        tasks=(TaskUse(task_id="t2", prompt="two\nlines " + "long " * 30, num_samples=3),),
        sampled_by=(
            VersionEdge(
                policy="solver",
                version=2,
                from_policy="planner",
                from_version=2,
                relation="sampled",
                num_calls=1,
            ),
        ),
        ancestors=tuple(
            Ancestor(policy="solver", version=v, step=v, kind="update", num_samples=3, num_tasks=1)
            for v in (2, 1, 0)
        ),
    )


def test_the_json_holds_everything(lineage: VersionLineage) -> None:
    found = json.loads(lineage_json(lineage))
    assert (found["row"]["version"], len(found["samples"]), found["samples"][0]["reward"]) == (2, 3, None)
    assert found["tasks"][0]["prompt"] == lineage.tasks[0].prompt


def test_the_text_names_the_version_its_parent_and_each_part(lineage: VersionLineage) -> None:
    text = lineage_text(lineage)
    assert text.startswith("r/solver@2  (update, step 2, parent solver@1)\n")
    for part in ("ms3", "planner@2", "0 to 1", "all versions behind it (3)", "two lines long"):
        assert part in text


def test_the_text_tells_what_made_it_and_how_many_files_it_took(lineage: VersionLineage) -> None:
    text = lineage_text(lineage)
    for part in ("made by start 3 at 2026", "(2 files)", "package-3 1.20.300  and 5 more"):
        assert part in text
    assert text.splitlines()[-1] == "7 of 90 files opened"
    assert "samples of its micro-batches are not in its step" not in text
    assert "2 samples of its micro-batches are not" in lineage_text(replace(lineage, num_missing_samples=2))


def test_a_cut_table_says_how_many_rows_it_leaves_out(lineage: VersionLineage) -> None:
    text = lineage_text(lineage, max_rows=2)
    assert text.count("… 1 more") == 2
    assert "x1" not in text  # the smallest of three advantages


def test_no_line_is_wider_than_a_terminal_and_none_is_torn_by_a_prompt(lineage: VersionLineage) -> None:
    assert max(map(len, lineage_text(lineage).splitlines())) <= 110


def test_a_version_without_samples_is_shown_with_empty_parts(build: Any) -> None:
    text = lineage_text(VersionLineage(row=build.version("solver", 0, loss=None)))
    assert "parent none" in text
    assert "loss -" in text
    assert "made by micro-batches (0)" in text
