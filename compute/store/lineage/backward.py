"""What made a policy version: micro-batches, samples, calls, episodes, tasks, and the versions behind it.

Rows are kept for direct relations: only the step that made the version is opened for them. The closure back
to version 0 is computed at version grain, with counts, from the run's index. A version is made by the
micro-batches of its policy and step that were taken on its parent. The versions of *every* policy that
answered calls of those samples' episodes influenced it, not only those of its own policy. Synchronous; the
CLI, Dagster and the report call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from megloom.compute.graph.closure import hops_from
from megloom.compute.graph.records import MicroBatchRecord, PolicyVersionRecord, ProvenanceRecord
from megloom.compute.graph.schemas import from_table
from megloom.compute.store.errors import CorruptFile
from megloom.compute.store.lineage.run_index import RunIndex
from megloom.compute.store.lineage.versions import VersionEdge, VersionGraph, VersionKey, VersionRow


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectSample:
    """A training row of the version. `reward` is its own, else its call's, else its episode's, else None."""

    sample_id: str
    step: int
    kind: str
    agent: str
    task_id: str | None
    episode_id: str
    invocation_id: str | None
    advantage: float
    reward: float | None
    sampled_by_min: int | None
    sampled_by_max: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCount:
    agent: str
    step: int
    kind: str
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskUse:
    """A task behind the version's samples; `prompt` is None if its row was not recorded."""

    task_id: str
    prompt: str | None
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ancestor:
    """A version in the closure. `step` and `kind` are None for a policy that is not trained in this run."""

    policy: str
    version: int
    step: int | None
    kind: str | None
    num_samples: int
    num_tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionLineage:
    """Everything behind one version. `ancestors` starts with the version itself, then newest step first.

    `provenance` is the start of the session that made it, None if it was not recorded. `num_missing_samples`
    are samples that its micro-batches name and that its step does not hold.
    """

    row: PolicyVersionRecord
    provenance: ProvenanceRecord | None = None
    micro_batches: tuple[MicroBatchRecord, ...] = field(default=())
    sample_counts: tuple[SampleCount, ...] = field(default=())
    samples: tuple[DirectSample, ...] = field(default=())
    num_missing_samples: int = 0
    num_episodes: int = 0
    tasks: tuple[TaskUse, ...] = field(default=())
    sampled_by: tuple[VersionEdge, ...] = field(default=())
    ancestors: tuple[Ancestor, ...] = field(default=())
    edges: tuple[VersionEdge, ...] = field(default=())
    num_files_opened: int = 0
    num_files: int = 0


_SAMPLE_COLUMNS = (
    "sample_id", "step", "kind", "agent", "task_id", "episode_id", "invocation_id",
    "advantage", "reward", "version_min", "version_max",
)  # fmt: skip


def version_lineage(store_root: str, run: str, policy: str, version: int | Literal["last"]) -> VersionLineage:
    """Everything behind `run/policy@version`; "last" is the newest version.

    Raises: FileNotFoundError if the run has no sealed step or no such version; CorruptFile for a
    damaged file.
    """
    index = RunIndex(store_root, run)
    graph = VersionGraph(index)
    row = graph.find((policy, version))
    batches = micro_batches_of(index, row)
    named = dict.fromkeys(sample for batch in batches for sample in batch.sample_ids)
    samples = _direct_samples(index, row, list(named))
    closure = hops_from(graph.sources, [(row.policy, row.version)])
    edges = [edge for key in closure for edge in graph.edges.get(key, ())]
    edges.sort(key=lambda e: (-e.version, e.policy, e.relation, e.from_policy, -e.from_version))
    counts = Counter((s.agent, s.step, s.kind) for s in samples)
    return VersionLineage(
        row=_version_record(index, row),
        provenance=provenance_at(index, row.step),
        micro_batches=tuple(batches),
        sample_counts=tuple(
            SampleCount(agent=agent, step=step, kind=kind, num_samples=num)
            for (agent, step, kind), num in sorted(counts.items())
        ),
        samples=tuple(samples),
        num_missing_samples=len(named) - len(samples),
        num_episodes=len({s.episode_id for s in samples if s.episode_id}),
        tasks=tuple(_tasks(index, samples)),
        sampled_by=tuple(e for e in edges if e.made == (row.policy, row.version) and e.relation == "sampled"),
        ancestors=tuple(_ancestors(graph, closure)),
        edges=tuple(edges),
        num_files=index.num_files,
        num_files_opened=index.num_files_opened,
    )


def micro_batches_of(index: RunIndex, row: VersionRow) -> list[MicroBatchRecord]:
    """The micro-batches that made the version, in the order in which their gradients were taken."""
    if row.parent_version is None:
        return []
    table = index.read("micro_batches", [row.step])
    mine = pc.and_(pc.equal(table["policy"], row.policy), pc.equal(table["base_version"], row.parent_version))
    return sorted(from_table("micro_batches", table.filter(mine)), key=lambda m: int(m.position))


def task_prompts(index: RunIndex, task_ids: Iterable[str]) -> dict[str, str]:
    """The prompts of those tasks that are recorded."""
    wanted = pa.array(sorted(set(task_ids)), pa.string())
    steps = index.steps_with("tasks") if len(wanted) else []
    if not steps:
        return {}
    table = index.read("tasks", steps, ("task_id", "prompt"))
    table = table.filter(pc.is_in(table["task_id"], wanted))
    return dict(zip(table["task_id"].to_pylist(), table["prompt"].to_pylist(), strict=True))


def provenance_at(index: RunIndex, step: int) -> ProvenanceRecord | None:
    """The newest start of the session that was recorded at or before `step`."""
    steps = [at for at in index.steps_with("provenance") if at <= step]
    rows = from_table("provenance", index.read("provenance", steps[-1:])) if steps else []
    return max(rows, key=lambda start: int(start.epoch), default=None)


def _version_record(index: RunIndex, row: VersionRow) -> PolicyVersionRecord:
    rows: list[PolicyVersionRecord] = from_table("policy_versions", index.read("policy_versions", [row.step]))
    for record in rows:
        if (record.policy, record.version) == (row.policy, row.version):
            return record
    raise CorruptFile(
        f"{index.root}: run {index.run}: the index says that step {row.step} made {row.policy}@{row.version},"
        f" its policy_versions do not hold it"
    )


def _direct_samples(index: RunIndex, row: VersionRow, named: list[str]) -> list[DirectSample]:
    if not named:
        return []
    table = index.read("samples", [row.step], _SAMPLE_COLUMNS)
    rows = table.filter(pc.is_in(table["sample_id"], pa.array(named, pa.string()))).to_pylist()
    calls = _calls(index, row.step, [r["invocation_id"] for r in rows if r["invocation_id"] is not None])
    episodes = _episodes(index, row.step, [r["episode_id"] for r in rows if r["episode_id"]])
    return sorted((_sample(r, calls, episodes) for r in rows), key=lambda s: s.sample_id)


def _sample(
    row: Mapping[str, Any], calls: Mapping[str, Mapping[str, Any]], episodes: Mapping[str, Mapping[str, Any]]
) -> DirectSample:
    """What the sample does not know of itself (schema 1) is its call's, else its episode's."""
    call = calls.get(row["invocation_id"] or "", {})
    episode = episodes.get(row["episode_id"], {})
    low = _first(row["version_min"], call.get("version_min"))
    return DirectSample(
        sample_id=row["sample_id"],
        step=row["step"],
        kind=row["kind"],
        agent=row["agent"],
        task_id=_first(row["task_id"], episode.get("task_id")),
        episode_id=row["episode_id"],
        invocation_id=row["invocation_id"],
        advantage=row["advantage"],
        reward=_first(row["reward"], call.get("reward"), episode.get("reward")),
        sampled_by_min=low,
        sampled_by_max=_first(row["version_max"], call.get("version_max"), low),
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _calls(index: RunIndex, step: int, ids: list[str]) -> dict[str, Mapping[str, Any]]:
    columns = ("invocation_id", "version_min", "version_max", "reward")
    if not ids:
        return {}
    table = index.read("invocations", [step], columns)
    rows = table.filter(pc.is_in(table["invocation_id"], pa.array(ids, pa.string()))).to_pylist()
    return {row["invocation_id"]: row for row in rows}


def _episodes(index: RunIndex, step: int, ids: list[str]) -> dict[str, Mapping[str, Any]]:
    """The scored attempt stands for an episode, else the first."""
    columns = ("episode_id", "attempt", "task_id", "state", "reward")
    if not ids:
        return {}
    table = index.read("episodes", [step], columns)
    rows = table.filter(pc.is_in(table["episode_id"], pa.array(ids, pa.string()))).to_pylist()
    best: dict[str, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["state"] != "scored", row["attempt"])):
        best.setdefault(row["episode_id"], row)
    return best


def _tasks(index: RunIndex, samples: list[DirectSample]) -> list[TaskUse]:
    counts = Counter(s.task_id for s in samples if s.task_id is not None)
    prompts = task_prompts(index, counts)
    return [
        TaskUse(task_id=task, prompt=prompts.get(task), num_samples=num)
        for task, num in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def _ancestors(graph: VersionGraph, closure: Mapping[VersionKey, int]) -> list[Ancestor]:
    start, *others = closure
    newest_first = sorted(others, key=lambda key: (-graph.age(key)[0], key[0], -key[1]))
    return [ancestor(graph, key) for key in (start, *newest_first)]


def ancestor(graph: VersionGraph, key: VersionKey) -> Ancestor:
    """The version as part of a closure."""
    row = graph.rows.get(key)
    return Ancestor(
        policy=key[0],
        version=key[1],
        step=None if row is None else row.step,
        kind=None if row is None else row.kind,
        num_samples=0 if row is None else row.num_samples,
        num_tasks=0 if row is None else row.num_tasks,
    )
