"""Answers about lineage as text for a terminal and as JSON for programs. Pure.

Tables show at most `max_rows` rows; a cut one says how many rows it leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megloom.compute.graph.records import InvocationRecord, MicroBatchRecord
from megloom.compute.store.lineage.backward import Ancestor, DirectSample, VersionLineage
from megloom.compute.store.lineage.diff import LineageDiff, Side
from megloom.compute.store.lineage.episode import EpisodeCalls
from megloom.compute.store.lineage.forward import Influence
from megloom.compute.store.lineage.path import LineagePath
from megloom.compute.store.lineage.table import section, show, span, table


def lineage_json(answer: Any) -> str:
    """The whole answer, nothing cut, keys as in the dataclasses."""
    return json.dumps(asdict(answer), indent=2, ensure_ascii=False, default=str)


def lineage_text(lineage: VersionLineage, max_rows: int = 10) -> str:
    """What made one version."""
    row = lineage.row
    parent = "none" if row.parent_version is None else f"{row.policy}@{row.parent_version}"
    head = [
        f"{row.run}/{row.policy}@{row.version}  ({row.kind}, step {row.step}, parent {parent})",
        f"  weights {row.uri}  digest {row.digest}",
        f"  config {row.config_hash}  code {row.code_hash}  reward {show(row.reward_hash or None)}"
        f"  created {row.created_at}",
        f"  loss {show(row.loss)}  grad_norm {show(row.grad_norm)}"
        f"  optimizer steps {row.num_optimizer_steps}  trainable tokens {row.num_trainable}",
        *_provenance(lineage),
    ]
    if lineage.num_missing_samples:
        head.append(f"  {lineage.num_missing_samples} samples of its micro-batches are not in its step")
    largest = sorted(lineage.samples, key=lambda s: (-abs(s.advantage), s.sample_id))
    sections = [
        section(
            "made by micro-batches",
            ("micro-batch", "position", "on", "cell", "samples", "trainable"),
            [
                (m.micro_batch_id, m.position, _at(m.policy, m.base_version), m.cell, *_sizes(m))
                for m in lineage.micro_batches
            ],
            max_rows,
        ),
        section(
            f"samples by agent: {len(lineage.samples)} from {lineage.num_episodes} episodes",
            ("agent", "step", "kind", "samples"),
            [(s.agent, s.step, s.kind, s.num_samples) for s in lineage.sample_counts],
            max_rows,
        ),
        section(
            "largest advantages",
            ("sample", "agent", "task", "advantage", "reward", "sampled by"),
            [(s.sample_id, s.agent, s.task_id, s.advantage, s.reward, _sampled_by(s)) for s in largest],
            max_rows,
        ),
        section(
            "tasks",
            ("task", "samples", "prompt"),
            [(t.task_id, t.num_samples, t.prompt) for t in lineage.tasks],
            max_rows,
        ),
        section(
            "its episodes were sampled by",
            ("version", "calls"),
            [(f"{e.from_policy}@{e.from_version}", e.num_calls) for e in lineage.sampled_by],
            max_rows,
        ),
        _versions("all versions behind it", lineage.ancestors, max_rows),
    ]
    return "\n".join([*head, *sections, "", _files(lineage)])


def influence_text(influence: Influence, max_rows: int = 10) -> str:
    """What a task or a reward function influenced."""
    direct = {(use.policy, use.version) for use in influence.direct}
    head = [f"{influence.what} {influence.name} in run {influence.run}"]
    if influence.prompt is not None:
        head.append(f"  {show(influence.prompt, 100)}")
    num = len(direct) + len(influence.reached)
    head.append(f"  influenced {num} of {influence.num_versions} versions: {len(direct)} directly")
    sections = [
        section(
            "directly, by their samples",
            ("version", "step", "agent", "samples"),
            [(f"{u.policy}@{u.version}", u.step, u.agent, u.num_samples) for u in influence.direct],
            max_rows,
        ),
        section(
            "through other versions",
            ("version", "step", "hops"),
            [(f"{r.policy}@{r.version}", r.step, r.num_hops) for r in influence.reached],
            max_rows,
        ),
    ]
    return "\n".join([*head, *sections, "", _files(influence)])


def diff_text(diff: LineageDiff, max_rows: int = 10) -> str:
    """How two versions differ."""
    sides = (diff.one, diff.other)
    names = [f"{side.policy}@{side.version}" for side in sides]
    lines = [
        f"{names[0]} and {names[1]} in run {diff.run}",
        *table(
            ("", "step", "versions behind it", "tasks", "samples"),
            [
                (n, s.step, s.num_versions, s.num_tasks, s.num_samples)
                for n, s in zip(names, sides, strict=True)
            ]
            + [("shared", None, diff.num_shared_versions, diff.num_shared_tasks, None)],
        ),
    ]
    for name, side in zip(names, sides, strict=True):
        lines += _only_here(name, side, max_rows)
    between = diff.between
    if between is None:
        lines += ["", "neither stands behind the other"]
    else:
        title = f"between {between.earlier} and {between.later}, {_hops(between.num_hops)} apart"
        lines.append(_versions(title, between.versions, max_rows))
    return "\n".join([*lines, "", _files(diff)])


def path_text(path: LineagePath, _max_rows: int | None = None) -> str:
    """The chain, one hop a line; it is never cut."""
    if path.why_not is not None:
        text = f"no way from sample {path.sample_id} to {path.version}: {path.why_not}"
    else:
        lines = [f"{path.sample_id}  (sample of step {path.step}, run {path.run})"]
        lines += [f"  → {hop.to}  {hop.reason}" for hop in path.hops]
        text = "\n".join(lines)
    return f"{text}\n\n{_files(path)}"


def episode_text(answer: EpisodeCalls, max_rows: int = 10) -> str:
    """The episode's calls as a table."""
    episode = answer.episode
    head = [
        f"{episode.run}/{episode.episode_id}  ({episode.purpose}, step {episode.step}, {episode.state},"
        f" attempt {episode.attempt}, attempts recorded {answer.num_attempts})",
        f"  task {episode.task_id}  {show(answer.task.prompt if answer.task else None)}",
        f"  reward {show(episode.reward)} ({episode.reward_status}, reward function {episode.reward_hash})"
        f"  took {episode.finished_s - episode.started_s:.2f} s",
    ]
    if episode.failure is not None:
        head.append(f"  failed in {show(episode.failure_boundary)}: {show(episode.failure, 90)}")
    parents: dict[str, list[str]] = {}
    index = {call.invocation_id: call.index for call in answer.calls}
    for edge in answer.edges:
        parents.setdefault(edge.child, []).append(f"{index[edge.parent]} {edge.kind}")
    rows = [_call_row(call, parents.get(call.invocation_id, [])) for call in answer.calls]
    headers = ("call", "agent", "sampled by", "state", "after", "tokens", "reward", "text")
    return "\n".join([*head, section("calls", headers, rows, max_rows), "", _files(answer)])


def _provenance(lineage: VersionLineage) -> list[str]:
    start = lineage.provenance
    if start is None:
        return ["  made by a start of the session that was not recorded"]
    code, packages = json.loads(start.code_hashes), json.loads(start.packages)
    shown = "  ".join(f"{name} {packages[name]}" for name in sorted(packages)[:4])
    more = f"  and {len(packages) - 4} more" if len(packages) > 4 else ""
    return [
        f"  made by start {start.epoch} at {start.started_at} of {show(start.workload, 60)}",
        f"    config {start.config_hash}  code {start.code_hash} ({len(code)} files)",
        f"    {shown}{more}",
    ]


def _only_here(name: str, side: Side, max_rows: int) -> list[str]:
    hashes = [
        f"  {what} only behind {name}: {', '.join(values)}"
        for what, values in (
            ("config", side.only_config_hashes),
            ("code", side.only_code_hashes),
            ("reward", side.only_reward_hashes),
        )
        if values
    ]
    tasks = [(t.task_id, t.num_samples, t.prompt) for t in side.only_tasks]
    return [
        _versions(f"versions only behind {name}", side.only_versions, max_rows),
        section(f"tasks only behind {name}", ("task", "samples", "prompt"), tasks, max_rows),
        *hashes,
    ]


def _versions(title: str, versions: Sequence[Ancestor], max_rows: int) -> str:
    rows = [(f"{v.policy}@{v.version}", v.step, v.kind, v.num_samples, v.num_tasks) for v in versions]
    return section(title, ("version", "step", "kind", "samples", "tasks"), rows, max_rows)


def _files(answer: VersionLineage | Influence | LineageDiff | LineagePath | EpisodeCalls) -> str:
    return f"{answer.num_files_opened} of {answer.num_files} files opened"


def _call_row(call: InvocationRecord, parents: list[str]) -> tuple[Any, ...]:
    return (
        call.index,
        call.agent,
        _at(call.policy, span(call.version_min, call.version_max)),
        call.state,
        ", ".join(parents) or None,
        f"{call.num_prompt_tokens} → {call.num_completion_tokens}",
        call.reward,
        show(call.failure or call.text, 24),
    )


def _sizes(batch: MicroBatchRecord) -> tuple[int, int]:
    return len(batch.sample_ids), batch.num_trainable


def _sampled_by(sample: DirectSample) -> str | None:
    return span(sample.sampled_by_min, sample.sampled_by_max)


def _at(policy: str, version: Any) -> str:
    return f"{policy}@{'-' if version is None else version}"


def _hops(num: int) -> str:
    return f"{num} hop" if num == 1 else f"{num} hops"
