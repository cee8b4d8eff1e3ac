from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megloom.compute.graph.records import SampleRecord
from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.path import lineage_path
from megloom.compute.store.manifest import step_folder
from megloom.compute.store.seal import write_step
from tests.compute.store.lineage.runs import random_run
from tests.compute.store.lineage.test_lineage_backward import step_0, step_1, step_2


@pytest.fixture
def sealed(tmp_path: Path, build: Any) -> str:
    root = str(tmp_path)
    dropped = build.sample("dropped", step=2, state="dropped", advantage=0.0, micro_batch_id=None)
    for step, records in enumerate((step_0(build), step_1(build), [*step_2(build), dropped])):
        write_step(Folder(root), "r", step, records, step - 1 if step else None, {})
    return root


def test_each_hop_tells_its_reason(sealed: str) -> None:
    path = lineage_path(sealed, "r", "xs2", ("solver", "last"))
    assert [(hop.source, hop.to, hop.reason) for hop in path.hops] == [
        ("xs2", "ms2", "the micro-batch took the sample's gradient"),
        ("ms2", "solver@1", "gradient 1 of the update of solver@0"),
        (
            "solver@1",
            "solver@2",
            "its weights continued from it and it answered 1 call of the samples' episodes",
        ),
    ]
    assert (path.why_not, path.step) == (None, 1)


def test_a_path_crosses_from_one_policy_to_another(sealed: str) -> None:
    hops = lineage_path(sealed, "r", "d0", ("solver", 1)).hops
    assert [hop.to for hop in hops] == ["m0", "planner@1", "solver@1"]
    assert hops[-1].reason == "it answered 1 call of the samples' episodes"


def test_a_dropped_sample_has_no_path_and_says_why(sealed: str) -> None:
    path = lineage_path(sealed, "r", "dropped", ("solver", 2))
    assert path.hops == ()
    assert path.why_not == "no micro-batch took it: it is dropped, its advantage is 0"


def test_there_is_no_path_to_an_earlier_version(sealed: str) -> None:
    path = lineage_path(sealed, "r", "xs3", ("solver", 1))
    assert path.hops == ()
    assert path.why_not == "it made solver@2 in step 2, which stands not behind solver@1 of step 1"


def test_an_id_that_names_its_step_opens_no_other_steps_samples(tmp_path: Path, build: Any) -> None:
    root, steps = str(tmp_path), random_run(build, 3, 12)
    for step, records in enumerate(steps):
        write_step(Folder(root), "r", step, records, None, {})
    samples = [r for records in steps for r in records if isinstance(r, SampleRecord)]
    first, last = samples[0], samples[-1]
    assert first.step < last.step
    (lost,) = (
        n for n in Folder(root).names(step_folder("r", first.step)) if n.startswith(f"samples-{first.agent}")
    )
    Folder(root).remove(f"{step_folder('r', first.step)}/{lost}")
    assert lineage_path(root, "r", last.sample_id, ("solver", "last")).step == last.step
    with pytest.raises(FileNotFoundError, match=lost):
        lineage_path(root, "r", first.sample_id, ("solver", "last"))


def test_an_unknown_sample_is_refused_with_where_it_was_looked_for(sealed: str) -> None:
    with pytest.raises(FileNotFoundError, match="run r has no sample nothing in steps 0 to 2"):
        lineage_path(sealed, "r", "nothing", ("solver", 2))
    with pytest.raises(FileNotFoundError, match="no sample g000001-0000-m000-a0-i000-s in step 1"):
        lineage_path(sealed, "r", "g000001-0000-m000-a0-i000-s", ("solver", 2))
