"""What a task or a reward function influenced: the versions made from it, and those made from their data.

A version is influenced directly if its own samples belong to the task (their episodes were scored by the
function), else through a version that it continued from or that answered calls of its samples' episodes.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile

from megloom.compute.graph.closure import hops_from
from megloom.compute.store.lineage.backward import task_prompts
from megloom.compute.store.lineage.run_index import RunIndex, did_you_mean
from megloom.compute.store.lineage.versions import VersionGraph, VersionKey


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectUse:
    """Samples of `agent` behind one version; `agent` is None where the index counts all agents together."""

    policy: str
    version: int
    step: int
    agent: str | None
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """A version that was influenced through others; `num_hops` versions back is a direct one."""

    policy: str
    version: int
    step: int
    num_hops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Influence:
    """`what` is "task" or "reward". `prompt` is None for a reward and for a task that was not recorded."""

    what: str
    name: str
    run: str
    prompt: str | None
    direct: tuple[DirectUse, ...]
    reached: tuple[Reached, ...]
    num_versions: int
    num_files_opened: int
    num_files: int


def task_influence(store_root: str, run: str, task_id: str) -> Influence:
    """The versions that the task influenced; none if no version was made from it.

    Raises: FileNotFoundError if the run knows no such task.
    """
    index = RunIndex(store_root, run)
    rows = index.rows_of("index_uses", task_id)
    prompt = task_prompts(index, [task_id]).get(task_id)
    if not rows and prompt is None:
        raise FileNotFoundError(f"run {run} has no task {task_id}{_nearest_task(index, task_id)}")
    direct = [DirectUse(**{k: v for k, v in row.items() if k != "task_id"}) for row in rows]
    return _influence(index, "task", task_id, prompt, direct)


def reward_influence(store_root: str, run: str, reward_hash: str) -> Influence:
    """The versions that samples scored by the reward function influenced.

    Raises: FileNotFoundError if no version's samples were scored by it.
    """
    index = RunIndex(store_root, run)
    rows = index.rows_of("index_rewards", reward_hash)
    if not rows:
        known = set(index.table("index_rewards")["reward_hash"].to_pylist())
        raise FileNotFoundError(
            f"run {run}: no version's samples were scored by reward {reward_hash}"
            f"{did_you_mean(reward_hash, sorted(known))}"
        )
    direct = [DirectUse(agent=None, **{k: v for k, v in row.items() if k != "reward_hash"}) for row in rows]
    return _influence(index, "reward", reward_hash, None, direct)


def _influence(
    index: RunIndex, what: str, name: str, prompt: str | None, direct: list[DirectUse]
) -> Influence:
    graph = VersionGraph(index)
    starts = dict.fromkeys((use.policy, use.version) for use in direct)
    hops = hops_from(graph.users, starts)
    reached = [
        Reached(policy=key[0], version=key[1], step=graph.rows[key].step, num_hops=num)
        for key, num in hops.items()
        if num
    ]
    return Influence(
        what=what,
        name=name,
        run=index.run,
        prompt=prompt,
        direct=tuple(sorted(direct, key=lambda u: (u.step, u.policy, u.version, u.agent or ""))),
        reached=tuple(sorted(reached, key=lambda r: (r.step, r.policy, r.version))),
        num_versions=len(graph.rows),
        num_files=index.num_files,
        num_files_opened=index.num_files_opened,
    )


def _nearest_task(index: RunIndex, task_id: str) -> str:
    """Task ids are hashes, so the nearest is the one that shares the longest beginning."""
    known = sorted(set(index.table("index_uses")["task_id"].to_pylist()))
    at = bisect.bisect(known, task_id)
    around = known[max(0, at - 1) : at + 1]
    if not around:
        return ""
    return f", did you mean {max(around, key=lambda other: _num_shared(task_id, other))!r}?"


def _num_shared(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def tasks_of(index: RunIndex, versions: set[VersionKey]) -> dict[str, int]:
    """The tasks directly behind any of the versions, with the number of their samples."""
    counts: dict[str, int] = defaultdict(int)
    table = index.table("index_uses").select(["task_id", "policy", "version", "num_samples"])
    for batch in table.to_batches(max_chunksize=65_536):  # the whole table as Python values would be large
        for task, policy, version, num in zip(*(c.to_pylist() for c in batch.columns), strict=True):
            if (policy, version) in versions:
                counts[task] += num
    return counts
