"""The checks of a step: what may differ, and what must stop the run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megloom.compute.conductor.checks import step_checks
from megloom.compute.conductor.gradients import LaneStep, Taken
from megloom.compute.conductor.reports import CheckReport
from megloom.compute.trainers.protocol import MicroBatch, UpdateReport


def applied_once(sent: Sequence[str], applied: Sequence[str]) -> CheckReport:
    lane = LaneStep(
        taken=[
            Taken(
                batch=MicroBatch(micro_batch_id=name, loss="policy_gradient", rows=()),
                samples=[],
                position=position,
            )
            for position, name in enumerate(sent)
        ],
        update=UpdateReport(grad_norm=1.0, num_trainable=1, micro_batch_ids=tuple(applied), seconds=0.0),
    )
    checks = step_checks(ended=[], versions={}, lanes={"solver": lane}, reward=(0.0, 0))
    return next(check for check in checks if check.name == "micro_batches_applied_once")


@pytest.mark.parametrize("applied", [["b0", "b1", "b2"], ["b0", "b2", "b1"], ["b2", "b1", "b0"]])
def test_micro_batches_may_be_applied_in_any_order(applied: list[str]) -> None:
    """What a satellite took comes in when it hands in its sums."""
    assert applied_once(["b0", "b1", "b2"], applied).passed


@pytest.mark.parametrize(
    "applied", [["b0", "b1"], ["b0", "b1", "b2", "b1"], ["b0", "b1", "b1"], ["b0", "b1", "b3"]]
)
def test_a_lost_doubled_or_foreign_micro_batch_stops_the_run(applied: list[str]) -> None:
    check = applied_once(["b0", "b1", "b2"], applied)
    assert not check.passed and check.blocking
    assert "solver: sent ['b0', 'b1', 'b2'], the update took" in check.detail
