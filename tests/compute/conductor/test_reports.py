"""Step reports: what trainers measured adds up over a step, and comes through JSON as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping

from megloom.compute.conductor.gradients import LaneStep, Taken
from megloom.compute.conductor.reports import StepReport
from megloom.compute.conductor.step_report import trainer_rates
from megloom.compute.trainers.protocol import GradientReport, MicroBatch
from tests.fake_service import policy_report, step_report


def taken(position: int, sums: Mapping[str, tuple[float, int]] | None) -> Taken:
    """A micro-batch and what was measured of it; None if its gradient was not taken."""
    name = f"b{position}"
    report = sums and GradientReport(
        micro_batch_id=name,
        num_rows=1,
        num_tokens=8,
        num_trainable=4,
        loss_sum=0.0,
        num_clipped=0,
        max_logprob_gap=None,
        seconds=0.0,
        sums=sums,
    )
    batch = MicroBatch(micro_batch_id=name, loss="policy_gradient", rows=())
    return Taken(batch=batch, samples=[], position=position, report=report or None)


def test_the_trainers_metrics_of_a_step_are_sums_over_its_micro_batches() -> None:
    work = LaneStep(
        taken=[taken(0, {"kl": (0.5, 4)}), taken(1, {"kl": (0.25, 2), "entropy": (3.0, 2)}), taken(2, None)]
    )
    assert trainer_rates(work) == {"kl": (0.75, 6), "entropy": (3.0, 2)}
    assert trainer_rates(LaneStep()) == {}


def test_a_report_comes_through_json_and_one_of_before_has_no_metrics() -> None:
    report = step_report(3, policies={"solver": policy_report(3, rates={"kl": (0.75, 6)})})
    data = json.loads(json.dumps(report.to_json()))
    assert StepReport.from_json(data) == report
    del data["policies"]["solver"]["rates"]
    assert StepReport.from_json(data).policies["solver"].rates == {}
