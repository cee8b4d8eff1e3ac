"""Held-out evaluation: one episode per task and draw, seeded, never trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from megloom.compute.conductor.episodes import EndedEpisode, Episode, EpisodeDesk
from megloom.compute.conductor.events import Clock
from megloom.compute.conductor.reports import EvaluationReport, Rate


async def evaluate(
    desk: EpisodeDesk,
    *,
    step: int,
    task_ids: Sequence[str],
    num_draws: int,
    full: bool,
    versions: Mapping[str, int],
    clock: Clock,
) -> EvaluationReport:
    """Runs `num_draws` episodes of each task with the committed versions.

    The seeds depend on task and draw only, so that two versions are compared on the same draws.
    """
    started_s = clock()
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(desk.run(_episode(step, task_id, draw)), name=f"eval:{task_id}:{draw}")
            for draw in range(num_draws)
            for task_id in task_ids
        ]
    ended = [task.result() for task in running]
    return EvaluationReport(
        num_tasks=len(task_ids),
        num_draws=num_draws,
        full=full,
        accuracy=reward_rate(ended),
        rates=metric_rates(ended),
        versions=dict(versions),
        num_failed=sum(not member.is_scored for member in ended),
        num_invocations=sum(len(member.vertices) for member in ended),
        seconds=clock() - started_s,
    )


def reward_rate(ended: Iterable[EndedEpisode]) -> Rate:
    """(sum, count) of the team reward over scored episodes; failures are counted apart, never as 0."""
    rewards = [member.outcome.reward for member in ended if member.is_scored]
    values = [reward for reward in rewards if reward is not None]
    return float(sum(values)), len(values)


def metric_rates(ended: Iterable[EndedEpisode]) -> dict[str, Rate]:
    """The workload's own metrics, summed as pairs, in the workload's order."""
    sums: dict[str, Rate] = {}
    for member in ended:
        for name, (value, count) in member.outcome.metrics.items():
            old = sums.get(name, (0.0, 0))
            sums[name] = (old[0] + value, old[1] + count)
    return sums


def _episode(step: int, task_id: str, draw: int) -> Episode:
    group_id = f"e{step:06d}-{task_id}"
    return Episode(
        episode_id=f"{group_id}-m{draw:03d}",
        group_id=group_id,
        task_id=task_id,
        split="eval",
        purpose="eval",
        step=step,
        epoch=0,
        member=draw,
    )
