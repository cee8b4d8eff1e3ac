"""The progress table and the closing numbers."""

from __future__ import annotations

from typing import Any

from megloom.compute.conductor.reports import AgentReport, EvaluationReport, PolicyReport, StepReport
from megloom.progress import HEADER_EVERY, ProgressTable


def evaluation(correct: float, *, full: bool) -> EvaluationReport:
    return EvaluationReport(
        num_tasks=10,
        num_draws=1,
        full=full,
        accuracy=(correct, 10),
        rates={"solver/correct": (1.0, 2)},
        versions={},
        num_failed=0,
        num_invocations=50,
        seconds=1.0,
    )


def report(step: int, **changes: Any) -> StepReport:
    policy = PolicyReport(
        trained=True,
        version=step,
        parent_version=step - 1,
        uri="",
        digest="",
        num_samples=1,
        num_trainable=1,
        num_micro_batches=1,
        loss=None,
        grad_norm=None,
        max_logprob_gap=None,
        max_off_policy_steps=0,
    )
    values: dict[str, Any] = {
        "run": "r",
        "step": step,
        "kind": "train",
        "started_s": 0.0,
        "finished_s": 2.0,
        "reward": (1.0, 4),
        "num_tasks": 1,
        "num_groups": 1,
        "num_episodes": 4,
        "num_invocations": 20,
        "num_prompt_tokens": 10,
        "num_completion_tokens": 100,
        "failures": {},
        "seconds_by_activity": {"roll": 1.5},
        "agents": {"solver": AgentReport(num_calls=4, num_tokens=9, reward=(1.0, 4))},
        "policies": {"solver": policy},
        "checks": [],
        "evaluation": None,
        "timeline": [],
        "meg_uri": "",
        "config_hash": "",
        "code_hash": "",
        "epoch": 1,
        "wall_time": "",
    }
    return StepReport(**{**values, **changes})


def test_a_row_shows_reward_accuracy_rates_speed_and_time_by_role() -> None:
    header, row = ProgressTable().lines(report(3, evaluation=evaluation(7, full=True)))
    assert "solver correct" in header and "held-out" in header and "roll" in header
    assert row.split() == ["3", "0.250", "70.0%", "50.0%", "100", "1.50", "0.00", "0.00", "0.00", "2.0"]


def test_a_small_evaluation_is_marked_and_does_not_count_as_before_or_after() -> None:
    table = ProgressTable()
    rows = [
        list(table.lines(step))[-1]
        for step in (
            report(0, evaluation=evaluation(2, full=True)),
            report(1, evaluation=evaluation(9, full=False)),
            report(2, evaluation=evaluation(6, full=True)),
        )
    ]
    assert "~90.0%" in rows[1] and (table.accuracy_before, table.accuracy) == (0.2, 0.6)


def test_what_was_not_measured_is_a_dash_and_never_zero() -> None:
    (_, row) = ProgressTable().lines(report(1, reward=(0.0, 0), agents={}))
    assert row.split()[1:3] == ["-", "-"]


def test_the_totals_count_calls_and_versions() -> None:
    table = ProgressTable()
    for step in (report(1, evaluation=evaluation(1, full=True)), report(2)):
        list(table.lines(step))
    assert (table.num_invocations, table.num_versions, table.last_step) == (90, 2, 2)


def test_the_header_returns_so_that_it_stays_in_sight() -> None:
    table = ProgressTable()
    headers = sum("held-out" in line for n in range(2 * HEADER_EVERY) for line in table.lines(report(n)))
    assert headers == 2


def test_a_report_survives_json() -> None:
    original = report(1, evaluation=evaluation(1, full=True))
    assert StepReport.from_json(original.to_json()) == original
