"""Builds the report of a step from its episodes, its gradient work and its cells' times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megloom.compute.conductor.episodes import EndedEpisode
from megloom.compute.conductor.evaluation import metric_rates, reward_rate
from megloom.compute.conductor.gradients import LaneStep
from megloom.compute.conductor.reports import (
    AgentReport,
    CheckReport,
    EvaluationReport,
    PolicyReport,
    Rate,
    StepReport,
)
from megloom.compute.conductor.run import Run
from megloom.compute.graph.records import CellIntervalRecord
from megloom.compute.scheduling.cursor import Cursor
from megloom.compute.scheduling.staleness import off_policy_steps
from megloom.compute.trainers.protocol import Published

MERGE_GAP_S = 0.02  # an engine that idles for less counts as busy: a batch's calls end a little apart
MAX_LISTED_BATCHES = 32  # the report is a summary; every micro-batch is a row of the store


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """All that a step did, before its commit. `cursor`: where the next step draws from, if this one drew.

    `algorithm_states` are those of the policies whose algorithm has one.
    """

    kind: str
    started_s: float
    ended: Sequence[EndedEpisode] = ()
    work: Mapping[str, LaneStep]
    published: Mapping[str, Published]
    evaluation: EvaluationReport | None
    checks: Sequence[CheckReport] = ()
    cursor: Cursor | None = None
    algorithm_states: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def step_report(run: Run, outcome: StepOutcome, timeline: Sequence[CellIntervalRecord]) -> StepReport:
    """What the clients get to see of the step in work."""
    ended, work, published = outcome.ended, outcome.work, outcome.published
    vertices = [vertex for member in ended for vertex in member.vertices]
    return StepReport(
        run=run.name,
        step=run.ledger.next_step,
        kind=outcome.kind,
        started_s=outcome.started_s,
        finished_s=run.clock(),
        reward=reward_rate(ended),
        num_tasks=len({member.episode.task_id for member in ended}),
        num_groups=len({member.episode.group_id for member in ended}),
        num_episodes=len(ended),
        num_invocations=len(vertices),
        num_prompt_tokens=sum(len(vertex.prompt_ids or ()) for vertex in vertices),
        num_completion_tokens=sum(len(vertex.token_ids) for vertex in vertices),
        failures=_failures(ended),
        seconds_by_activity=_seconds(timeline),
        agents=_agents(run, ended),
        policies={name: _policy(run, name, work.get(name), published.get(name)) for name in run.lanes},
        checks=list(outcome.checks),
        evaluation=outcome.evaluation,
        timeline=[_bar(interval) for interval in timeline],
        meg_uri=f"{run.paths.store_root}/meg/{run.name}/step={run.ledger.next_step:06d}",
        config_hash=run.config.config_hash(),
        code_hash=run.code_hash,
        epoch=run.epoch,
        wall_time=run.wall_time(),
    )


def engine_intervals(run: Run, ended: Sequence[EndedEpisode]) -> list[CellIntervalRecord]:
    """When each engine had work: the union of its calls' times."""
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for member in ended:
        for vertex in member.vertices:
            if vertex.cell and vertex.started_s is not None and vertex.finished_s is not None:
                spans.setdefault((vertex.cell, vertex.policy), []).append(
                    (vertex.started_s, vertex.finished_s)
                )
    intervals = []
    for (cell, policy), pairs in sorted(spans.items()):
        for start_s, end_s in merge_spans(pairs, gap_s=MERGE_GAP_S):
            intervals.append(
                CellIntervalRecord(
                    run=run.name,
                    step=run.ledger.next_step,
                    cell=cell,
                    role="roll",
                    policy=policy,
                    activity="roll",
                    start_s=start_s,
                    end_s=end_s,
                )
            )
    return intervals


def merge_spans(spans: Sequence[tuple[float, float]], *, gap_s: float) -> list[tuple[float, float]]:
    """The union of (start, end) spans; gaps of up to `gap_s` are closed."""
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if merged and start_s - merged[-1][1] <= gap_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def _seconds(timeline: Sequence[CellIntervalRecord]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for interval in timeline:
        seconds[interval.activity] = seconds.get(interval.activity, 0.0) + interval.end_s - interval.start_s
    return seconds


def _bar(interval: CellIntervalRecord) -> dict[str, Any]:
    return {
        "cell": interval.cell,
        "role": interval.role,
        "policy": interval.policy,
        "activity": interval.activity,
        "start_s": interval.start_s,
        "end_s": interval.end_s,
    }


def _failures(ended: Sequence[EndedEpisode]) -> dict[str, int]:
    causes: dict[str, int] = {}
    for member in ended:
        if not member.is_scored:
            cause = member.outcome.boundary or "unknown"
            causes[cause] = causes.get(cause, 0) + 1
    return causes


def _agents(run: Run, ended: Sequence[EndedEpisode]) -> dict[str, AgentReport]:
    rates = metric_rates(ended)
    reports = {}
    for agent in run.plan.agents:
        vertices = [v for member in ended for v in member.vertices if v.agent == agent]
        rewards = [
            call.reward
            for member in ended
            for call, vertex in _paired(member)
            if vertex.agent == agent and call.reward is not None
        ]
        reports[agent] = AgentReport(
            num_calls=len(vertices),
            num_tokens=sum(len(v.token_ids) for v in vertices),
            reward=(float(sum(rewards)), len(rewards)),
            rates={name: rate for name, rate in rates.items() if name.startswith(f"{agent}/")},
        )
    return reports


def _paired(member: EndedEpisode) -> list[tuple[Any, Any]]:
    vertices = {vertex.invocation_id: vertex for vertex in member.vertices}
    return [
        (call, vertices[call.invocation_id])
        for call in member.outcome.calls
        if call.invocation_id in vertices
    ]


def mean_loss(work: LaneStep) -> float | None:
    trainable = sum(taken.report.num_trainable for taken in work.taken if taken.report)
    total = sum(taken.report.loss_sum for taken in work.taken if taken.report)
    return total / trainable if trainable else None


def _largest_lag(work: LaneStep, trainer_version: int) -> int:
    return max((off_policy_steps(trainer_version, s.record.version_min) for s in work.trained()), default=0)


def _dropped(work: LaneStep) -> dict[str, int]:
    return dict(sorted(Counter(sample.cause or "unknown" for sample in work.dropped).items()))


def trainer_rates(work: LaneStep) -> dict[str, Rate]:
    """The trainer's own metrics over the step's micro-batches, as (sum, count of tokens)."""
    rates: dict[str, Rate] = {}
    for name, (value, count) in (pair for t in work.taken if t.report for pair in t.report.sums.items()):
        total, counted = rates.get(name, (0.0, 0))
        rates[name] = (total + value, counted + count)
    return rates


def _policy(run: Run, policy: str, work: LaneStep | None, published: Published | None) -> PolicyReport:
    committed = run.ledger.policies[policy]
    batches = work.taken if work else []
    gaps = [t.report.max_logprob_gap for t in batches if t.report and t.report.max_logprob_gap is not None]
    return PolicyReport(
        trained=published is not None,
        version=published.version if published else committed.version,
        parent_version=committed.version if published else committed.parent_version,
        uri=published.uri if published else committed.uri,
        digest=published.digest if published else committed.digest,
        num_samples=sum(len(taken.samples) for taken in batches),
        num_trainable=sum(taken.report.num_trainable for taken in batches if taken.report),
        num_micro_batches=len(batches),
        loss=mean_loss(work) if work else None,
        grad_norm=work.update.grad_norm if work and work.update else None,
        max_logprob_gap=max(gaps, default=None),
        max_off_policy_steps=_largest_lag(work, committed.version) if work else 0,
        dropped=_dropped(work) if work else {},
        rates=trainer_rates(work) if work else {},
        micro_batches=[
            {
                "micro_batch": taken.batch.micro_batch_id,
                "rows": len(taken.batch.rows),
                "tokens": taken.report.num_tokens if taken.report else 0,
                "trainable": taken.report.num_trainable if taken.report else 0,
                "loss_sum": taken.report.loss_sum if taken.report else None,
                "seconds": round(taken.finished_s - taken.started_s, 4),
            }
            for taken in batches[:MAX_LISTED_BATCHES]
        ],
    )
