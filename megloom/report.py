"""Writes a run's `report.html` from its step reports and its sealed records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.reports import StepReport, ratio
from megloom.compute.conductor.run import RunPaths
from megloom.compute.graph.records import CellIntervalRecord
from megloom.compute.graph.schemas import from_table
from megloom.compute.report.curves import Panel
from megloom.compute.report.episode import EpisodeStory
from megloom.compute.report.page import Headline, Page, Table, render_page
from megloom.compute.store.lineage.backward import version_lineage
from megloom.compute.store.lineage.text import lineage_text
from megloom.compute.store.reader import MegReader

Points = list[tuple[float, float | None]]


def write_report(
    config: SessionConfig, reports: Sequence[StepReport], *, home: Path, command: str, path: Path
) -> Path:
    """Returns the absolute path of the page; it needs nothing but a browser."""
    root = RunPaths(home=home, run=config.run, store=config.storage.root).store_root
    policy = next(word for word in command.split() if "@" in word).partition("@")[0]
    middle = _busiest(reports)
    page = Page(
        title=f"Run {config.run}",
        subtitle=f"{config.workload} · {reports[-1].step} steps · seed {config.seed} · {config.mode} mode",
        headlines=_headlines(reports),
        results=_results(reports),
        panels=_panels(reports),
        timeline_title=f"step {middle.step}: what each cell did",
        intervals=_intervals(middle),
        story=_story(root, config.run, middle.step),
        lineage_command=command,
        lineage=lineage_text(version_lineage(root, config.run, policy, "last"), max_rows=5),
        config={name: json.dumps(value) for name, value in config.model_dump(mode="json").items()},
    )
    path = path.resolve()
    path.write_text(render_page(page))
    return path


def _busiest(reports: Sequence[StepReport]) -> StepReport:
    """A step from the middle of the run: neither the warm start nor the last evaluation."""
    trained = [report for report in reports if report.kind == "train"]
    return trained[len(trained) // 2] if trained else reports[-1]


def _headlines(reports: Sequence[StepReport]) -> list[Headline]:
    full = [report.evaluation for report in reports if report.evaluation and report.evaluation.full]
    headlines = []
    if full:
        before, after = ratio(full[0].accuracy), ratio(full[-1].accuracy)
        note = f"{full[-1].num_tasks} held-out tasks, {full[-1].num_draws} draws"
        headlines += [
            Headline(label="team accuracy after the warm start", value=_percent(before), note=note),
            Headline(label="team accuracy at the end", value=_percent(after), note=note),
        ]
    calls = sum(report.num_invocations for report in reports)
    versions = sum(policy.trained for report in reports for policy in report.policies.values())
    return [
        *headlines,
        Headline(label="agent calls trained on", value=calls, note="recorded with tokens and logprobs"),
        Headline(label="policy versions", value=versions, note="each with its lineage"),
    ]


def _results(reports: Sequence[StepReport]) -> Table:
    """The evaluations, small ones marked."""
    evaluated = [(report.step, report.evaluation) for report in reports if report.evaluation is not None]
    names = sorted({name for _, evaluation in evaluated for name in evaluation.rates})
    rows = []
    for step, evaluation in evaluated:
        size = f"{evaluation.num_tasks} × {evaluation.num_draws}"
        rates = [_percent(ratio(evaluation.rates.get(name))) for name in names]
        rows.append([step, size, _percent(ratio(evaluation.accuracy)), *rates])
    return Table(headers=["step", "tasks × draws", "team accuracy", *names], rows=rows)


def _panels(reports: Sequence[StepReport]) -> list[Panel]:
    trained = [report for report in reports if report.kind == "train"]
    accuracy: Points = [(r.step, ratio(r.evaluation.accuracy)) for r in reports if r.evaluation]
    reward: Points = [(r.step, ratio(r.reward)) for r in trained]
    activities = sorted({name for r in trained for name in r.seconds_by_activity})
    agents = sorted({agent for r in trained for agent in r.agents})
    policies = sorted({policy for r in trained for policy in r.policies})
    return [
        Panel(
            title="Team accuracy",
            x_label="step",
            y_label="share of tasks",
            series={"held-out": accuracy, "training reward": reward},
            y_range=(0.0, 1.0),
        ),
        Panel(
            title="Each agent",
            x_label="step",
            y_label="rate",
            series={
                name: _rate_points(trained, agent, name)
                for agent in agents
                for name in _names(trained, agent)
            },
            y_range=(0.0, 1.0),
        ),
        Panel(
            title="Time by role",
            x_label="step",
            y_label="seconds a step",
            series={
                name: [(r.step, r.seconds_by_activity.get(name)) for r in trained] for name in activities
            },
        ),
        Panel(
            title="Gradient norm",
            x_label="step",
            y_label="norm",
            series={p: [(r.step, r.policies[p].grad_norm) for r in trained] for p in policies},
        ),
    ]


def _names(reports: Sequence[StepReport], agent: str) -> list[str]:
    return sorted({name for report in reports for name in report.agents[agent].rates})


def _rate_points(reports: Sequence[StepReport], agent: str, name: str) -> Points:
    return [(report.step, ratio(report.agents[agent].rates.get(name))) for report in reports]


def _intervals(report: StepReport) -> list[CellIntervalRecord]:
    return [CellIntervalRecord(run=report.run, step=report.step, **bar) for bar in report.timeline]


def _story(root: str, run: str, step: int) -> EpisodeStory | None:
    """The scored training episode with the most calls; the first of several."""
    reader = MegReader(root)

    def rows(table: str, of_step: int = step) -> list[Any]:
        return from_table(table, reader.read_table(run, table, [of_step]))

    episodes = [e for e in rows("episodes") if e.purpose == "train" and e.reward is not None]
    if not episodes:
        return None
    calls = rows("invocations")
    sizes = {e.episode_id: sum(c.episode_id == e.episode_id for c in calls) for e in episodes}
    episode = max(episodes, key=lambda e: (sizes[e.episode_id], e.reward))
    own = sorted((c for c in calls if c.episode_id == episode.episode_id), key=lambda c: c.index)
    edges = [edge for edge in rows("edges") if edge.episode_id == episode.episode_id]
    task = next(task for task in rows("tasks", 0) if task.task_id == episode.task_id)
    return EpisodeStory(
        episode=episode,
        calls=own,
        edges=edges,
        prompt=task.prompt,
        expected=task.ground_truth,
        result=own[-1].text,
        chosen=own[-1].invocation_id,
    )


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}%"
