"""When advantages are final: with the group, or with all groups of the step, as the policy's algorithm asks.

One estimator per policy and step. It gives a lane samples whose advantages nothing can change any more, and
at the step's end the algorithm's next state, which becomes part of the ledger with the commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megloom.compute.algorithms.base import Outcome, PolicyGradient
from megloom.compute.conductor.draws import DrawnGroup
from megloom.compute.conductor.samples import Aggregation, Sample, samples_of


class StepEstimates:
    """Only the step loop calls it. `state` is the algorithm's, as the last committed step left it."""

    def __init__(
        self, algorithm: PolicyGradient, aggregation: Aggregation, state: Mapping[str, float]
    ) -> None:
        self._algorithm, self._aggregation, self._state = algorithm, aggregation, dict(state)
        self._held: list[DrawnGroup] = []
        self._outcomes: list[Outcome] = []

    def add(self, drawn: DrawnGroup) -> list[list[Sample]]:
        """A complete group; returns the weighed samples of the groups that are final now: it, or none."""
        self._outcomes.extend(drawn.outcomes)
        if self._algorithm.scope == "step":
            self._held.append(drawn)
            return []
        return self._estimated([drawn])

    def close(self) -> list[list[Sample]]:
        """All groups of the step were added; returns the samples of those that waited, by the group's id.

        The order in which groups end is not that of the ids: it must not reach the micro-batches, so that a
        step gives the same numbers in every mode.
        """
        held, self._held = sorted(self._held, key=lambda drawn: drawn.group_id), []
        return self._estimated(held)

    def next_state(self) -> dict[str, float]:
        """The algorithm's state after this step."""
        in_order = sorted(self._outcomes, key=lambda o: (o.group_id, o.agent, o.key))
        return self._algorithm.next_state(in_order, self._state)

    def _estimated(self, groups: Sequence[DrawnGroup]) -> list[list[Sample]]:
        outcomes = [outcome for drawn in groups for outcome in drawn.outcomes]
        advantages = self._algorithm.estimate(outcomes, self._state)
        by_group: dict[str, dict[tuple[str, str], float]] = {drawn.group_id: {} for drawn in groups}
        for outcome, advantage in zip(outcomes, advantages, strict=True):
            by_group[outcome.group_id][outcome.agent, outcome.key] = advantage
        return [
            self._aggregation.weigh(samples_of(drawn, by_group[drawn.group_id], algorithm=self._algorithm))
            for drawn in groups
        ]
