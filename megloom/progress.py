"""The live progress table: one line per committed step, printed as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megloom.compute.conductor.reports import Rate, StepReport, ratio

HEADER_EVERY = 25
ACTIVITIES = ("roll", "gradient", "update", "publish")


class ProgressTable:
    """Formats steps. `accuracy_before` is the first full evaluation, `accuracy` the newest one."""

    def __init__(self) -> None:
        self._rows = 0
        self.accuracy_before: float | None = None
        self.accuracy: float | None = None
        self.num_invocations = 0
        self.num_versions = 0
        self.last_step = -1

    def lines(self, report: StepReport) -> Iterator[str]:
        """The lines that a step adds to the table."""
        evaluation = report.evaluation
        self.num_invocations += report.num_invocations + (evaluation.num_invocations if evaluation else 0)
        self.num_versions += sum(policy.trained for policy in report.policies.values())
        self.last_step = max(self.last_step, report.step)
        if evaluation is not None and evaluation.full:
            self.accuracy = ratio(evaluation.accuracy)
            if self.accuracy_before is None:
                self.accuracy_before = self.accuracy
        rates = _rates(report)
        if self._rows % HEADER_EVERY == 0:
            yield _header(rates)
        self._rows += 1
        yield _row(report, rates)


def _rates(report: StepReport) -> dict[str, Rate]:
    """One rate per agent: its first metric, from the step's episodes or else from its evaluation."""
    evaluated = report.evaluation.rates if report.evaluation else {}
    shown: dict[str, Rate] = {}
    for agent, agent_report in report.agents.items():
        own = dict(agent_report.rates)
        for name, rate in evaluated.items():
            if name.startswith(f"{agent}/"):
                own.setdefault(name, rate)
        for name, rate in list(own.items())[:1]:
            shown[name] = rate
    return shown


def _header(rates: Mapping[str, Rate]) -> str:
    names = [f"{name.replace('/', ' ').replace('_', ' ')[:20]:>20}" for name in rates]
    seconds = " ".join(f"{name:>8}" for name in ACTIVITIES)
    return f"{'step':>5} {'reward':>7} {'held-out':>9} {' '.join(names)} {'tok/s':>7} {seconds} {'wall s':>7}"


def _row(report: StepReport, rates: Mapping[str, Rate]) -> str:
    wall_s = report.finished_s - report.started_s
    evaluation = report.evaluation
    rollout_s = wall_s - (evaluation.seconds if evaluation else 0.0)
    accuracy = ratio(evaluation.accuracy) if evaluation else None
    mark = "" if evaluation is None or evaluation.full else "~"
    tokens_per_s = report.num_completion_tokens / rollout_s if rollout_s > 0 else 0.0
    cells = [f"{_percent(ratio(rate)):>20}" for rate in rates.values()]
    seconds = " ".join(f"{report.seconds_by_activity.get(name, 0.0):>8.2f}" for name in ACTIVITIES)
    reward, held_out = _number(ratio(report.reward)), mark + _percent(accuracy)
    return (
        f"{report.step:>5} {reward:>7} {held_out:>9} {' '.join(cells)}"
        f" {tokens_per_s:>7.0f} {seconds} {wall_s:>7.1f}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
