"""One episode with its calls and edges, found by its id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from megloom.compute.graph.ids import episode_of_id, step_of_id
from megloom.compute.graph.records import EdgeRecord, EpisodeRecord, InvocationRecord, TaskRecord
from megloom.compute.graph.schemas import from_table
from megloom.compute.store.lineage.run_index import RunIndex, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeCalls:
    """An episode's attempt and its calls in order. `task` is None if its row was not recorded."""

    episode: EpisodeRecord
    task: TaskRecord | None
    calls: tuple[InvocationRecord, ...]
    edges: tuple[EdgeRecord, ...]
    num_attempts: int
    num_files_opened: int
    num_files: int


def episode_calls(store_root: str, run: str, record_id: str) -> EpisodeCalls:
    """The episode of that id, or of the call or sample of that id; the scored attempt, else the last.

    Raises: FileNotFoundError if the run holds no such episode.
    """
    index = RunIndex(store_root, run)
    wanted = episode_of_id(record_id) or record_id
    step, attempts = _find(index, wanted)
    episode = max(attempts, key=lambda e: (e.state == "scored", e.attempt))
    calls: list[InvocationRecord] = _rows_of(index, "invocations", step, wanted)
    # A store of schema 1 does not say of which attempt a call is; ids of ours do.
    own = [call for call in calls if call.attempt == episode.attempt] or calls
    ids = {call.invocation_id for call in own}
    edges: list[EdgeRecord] = _rows_of(index, "edges", step, wanted)
    return EpisodeCalls(
        episode=episode,
        task=_task(index, episode.task_id),
        calls=tuple(sorted(own, key=lambda call: call.index)),
        edges=tuple(e for e in edges if e.parent in ids and e.child in ids),
        num_attempts=len(attempts),
        num_files=index.num_files,
        num_files_opened=index.num_files_opened,
    )


def _find(index: RunIndex, episode_id: str) -> tuple[int, list[EpisodeRecord]]:
    named = step_of_id(episode_id)
    for step in [named] if named in index.steps else index.steps:
        if found := _rows_of(index, "episodes", step, episode_id):
            return step, found
    where, hint = f"steps {index.steps[0]} to {index.steps[-1]}", ""
    if named in index.steps:
        known = index.read("episodes", [named], ("episode_id",))["episode_id"].to_pylist()
        where, hint = f"step {named}", did_you_mean(episode_id, sorted(set(known)))
    raise FileNotFoundError(f"run {index.run} has no episode {episode_id} in {where}{hint}")


def _rows_of(index: RunIndex, table: str, step: int, episode_id: str) -> list[Any]:
    arrow = index.read(table, [step])
    return from_table(table, arrow.filter(pc.equal(arrow["episode_id"], episode_id)))


def _task(index: RunIndex, task_id: str) -> TaskRecord | None:
    steps = index.steps_with("tasks")
    if not steps:
        return None
    arrow = index.read("tasks", steps)
    rows: list[TaskRecord] = from_table("tasks", arrow.filter(pc.equal(arrow["task_id"], task_id)))
    return next(iter(rows), None)
