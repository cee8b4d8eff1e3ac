"""A system file that cannot be loaded is refused with its place and its cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from megloom.compute.rollout.loading import load_workload
from megloom.compute.rollout.protocol import WorkloadError

LAG = """
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.workload import Optimizer, Policy
from megloom.pipelines.systems.arithmetic_model import MODEL

policy = Policy(
    model=MODEL, algorithm=Grpo(), optimizer=Optimizer(learning_rate=1e-3), max_off_policy_steps=2
)
"""


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(WorkloadError) as caught:
        load_workload(f"{name}:workload")
    return str(caught.value)


def test_lag_without_a_correction_is_refused_when_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(tmp_path, monkeypatch, "lag_file", LAG) == (
        "workload lag_file:workload: lag_file.py:6: Policy: max_off_policy_steps 2 without a correction: "
        "samples would be trained on as if today's weights had made them; set the algorithm's `correction`"
    )


def test_a_wrong_knob_names_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from megloom.compute.policy import Trainer\nTrainer(rank=2)\n"
    assert refusal(tmp_path, monkeypatch, "knob_file", source) == (
        "workload knob_file:workload: knob_file.py:2: Trainer.rank: Extra inputs are not permitted"
    )


def test_code_that_raises_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(tmp_path, monkeypatch, "raising_file", "\nprices = {}\nprices['a']\n") == (
        "workload raising_file:workload: raising_file.py:3: KeyError: 'a'"
    )


def test_a_module_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        WorkloadError, match="workload nowhere_at_all:workload: .*No module named 'nowhere_at_all'"
    ):
        load_workload("nowhere_at_all:workload")


def test_a_file_without_the_workload_names_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from megloom.pipelines.systems.arithmetic_team import workload as mine\n"
    assert "found NoneType (workloads in other_file: mine)" in refusal(
        tmp_path, monkeypatch, "other_file", source
    )
