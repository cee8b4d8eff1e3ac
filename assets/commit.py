"""The events of one committed step, in the order in which they become true.

At most 14 for three policies (`tasks` only with the first step, `evaluation` only where there was one), two
more per further policy: an event costs 15 ms of CPU, and the log has no end.
"""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg

from megloom.assets import checks, cluster, evaluation, gradients, meg, policies, rollouts, tasks
from megloom.assets.step import CommittedStep

Event = dg.AssetMaterialization | dg.AssetCheckEvaluation


def step_events(step: CommittedStep) -> Iterator[Event]:
    """Yields the step's events; the next step's behaviour policy last, unless a blocking check failed."""
    report, system = step.report, step.system
    if report.step == 0:
        yield tasks.event(step)
    if report.kind == "train":
        yield rollouts.event(step)
    yield meg.event(step)
    with_gradient = (name for name, policy in report.policies.items() if policy.num_micro_batches)
    yield from (gradients.event(step, name) for name in with_gradient)
    yield from (policies.version_event(step, name) for name in report.policies)
    if report.evaluation is not None:
        yield evaluation.event(step, report.evaluation)
    yield cluster.event(step)
    yield from checks.events(system, report)
    if not checks.failed_blocking(report):
        yield policies.behavior_event(step)
