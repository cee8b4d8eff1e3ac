"""The recent course of a run's numbers, for the small plots in the step's metadata.

Kept by the op that reports the steps; nobody else writes. Each series has its own points: a step without a
measurement adds none.
"""

from __future__ import annotations

from collections import defaultdict, deque

from megloom.compute.conductor.reports import StepReport, ratio

WINDOW = 40  # points of a plot: with more it would not be shown inline


class Curves:
    """The last `WINDOW` values of each series."""

    def __init__(self) -> None:
        self._series: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def add(self, report: StepReport) -> None:
        """Appends the step's measured values; steps come in order."""
        self._add("reward", ratio(report.reward))
        for name, policy in report.policies.items():
            self._add(f"loss/{name}", policy.loss)
        if report.evaluation is not None:
            self._add("accuracy", ratio(report.evaluation.accuracy))

    def of(self, name: str) -> list[float]:
        return list(self._series.get(name, ()))

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self._series[name].append(value)
