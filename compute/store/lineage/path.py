"""The shortest chain from a sample to a version: sample, micro-batch, version, …, version."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow.compute as pc

from megloom.compute.graph.closure import shortest_path
from megloom.compute.graph.ids import step_of_id
from megloom.compute.store.lineage.backward import micro_batches_of
from megloom.compute.store.lineage.run_index import RunIndex
from megloom.compute.store.lineage.versions import VersionEdge, VersionGraph, VersionKey, VersionName

_COLUMNS = ("sample_id", "kind", "state", "policy", "agent", "advantage")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """A link of the chain: `reason` says why `to` follows `source`."""

    source: str
    to: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LineagePath:
    """`hops` is empty if there is no chain; `why_not` says then why."""

    run: str
    sample_id: str
    version: str
    step: int
    hops: tuple[Hop, ...]
    why_not: str | None
    num_files_opened: int
    num_files: int


def lineage_path(store_root: str, run: str, sample_id: str, version: VersionName) -> LineagePath:
    """The shortest chain from the sample to the version.

    Raises: FileNotFoundError if the run holds no such sample, or the version was not made in it.
    """
    index = RunIndex(store_root, run)
    graph = VersionGraph(index)
    goal = graph.find(version)
    step, sample = _find_sample(index, sample_id)
    taken = _taken_in(index, graph, step, sample)
    path = shortest_path(graph.users, taken, (goal.policy, goal.version))
    name = f"{goal.policy}@{goal.version}"
    why_not = None
    if not taken:
        why_not = f"no micro-batch took it: it is {sample['state']}, its advantage is {sample['advantage']:g}"
    elif path is None:
        made = ", ".join(f"{policy}@{number}" for policy, number in taken)
        why_not = f"it made {made} in step {step}, which stands not behind {name} of step {goal.step}"
    return LineagePath(
        run=run,
        sample_id=sample_id,
        version=name,
        step=step,
        hops=tuple(_hops(graph, sample_id, taken, path)) if path else (),
        why_not=why_not,
        num_files=index.num_files,
        num_files_opened=index.num_files_opened,
    )


def _find_sample(index: RunIndex, sample_id: str) -> tuple[int, dict[str, Any]]:
    """The sample's step and row. An id that names its step opens that step alone, another all of them."""
    named = step_of_id(sample_id)
    for step in [named] if named in index.steps else index.steps:
        table = index.read("samples", [step], _COLUMNS)
        if rows := table.filter(pc.equal(table["sample_id"], sample_id)).to_pylist():
            return step, rows[0]
    where = f"step {named}" if named in index.steps else f"steps {index.steps[0]} to {index.steps[-1]}"
    raise FileNotFoundError(f"run {index.run} has no sample {sample_id} in {where}")


def _taken_in(
    index: RunIndex, graph: VersionGraph, step: int, sample: dict[str, Any]
) -> dict[VersionKey, tuple[str, int]]:
    """The versions that the sample made, each with the id and position of the micro-batch that took it."""
    taken: dict[VersionKey, tuple[str, int]] = {}
    for key, row in graph.rows.items():
        if row.step == step and row.policy == sample["policy"]:
            for batch in micro_batches_of(index, row):
                if sample["sample_id"] in batch.sample_ids:
                    taken.setdefault(key, (batch.micro_batch_id, batch.position))
    return taken


def _hops(
    graph: VersionGraph, sample_id: str, taken: dict[VersionKey, tuple[str, int]], path: list[VersionKey]
) -> list[Hop]:
    first = path[0]
    batch, position = taken[first]
    on = graph.rows[first].parent_version
    hops = [
        Hop(source=sample_id, to=batch, reason="the micro-batch took the sample's gradient"),
        Hop(
            source=batch,
            to=_name(first),
            reason=f"gradient {position} of the update of {first[0]}@{on}",
        ),
    ]
    for before, after in pairwise(path):
        edges = [edge for edge in graph.edges[after] if edge.source == before]
        hops.append(Hop(source=_name(before), to=_name(after), reason=" and ".join(map(_reason, edges))))
    return hops


def _reason(edge: VersionEdge) -> str:
    if edge.relation == "parent":
        return "its weights continued from it"
    calls = "1 call" if edge.num_calls == 1 else f"{edge.num_calls} calls"
    return f"it answered {calls} of the samples' episodes"


def _name(key: VersionKey) -> str:
    return f"{key[0]}@{key[1]}"
