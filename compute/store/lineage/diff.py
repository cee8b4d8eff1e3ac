"""How two versions differ in what stands behind them, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megloom.compute.graph.closure import hops_from
from megloom.compute.store.lineage.backward import Ancestor, TaskUse, ancestor, task_prompts
from megloom.compute.store.lineage.forward import tasks_of
from megloom.compute.store.lineage.run_index import RunIndex
from megloom.compute.store.lineage.versions import VersionGraph, VersionKey, VersionName


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What stands behind one of the two versions. The counts are of everything.

    A task's `num_samples` counts its samples in all versions of this side's closure.
    """

    policy: str
    version: int
    step: int
    num_versions: int
    num_tasks: int
    num_samples: int
    only_versions: tuple[Ancestor, ...]
    only_tasks: tuple[TaskUse, ...]
    only_config_hashes: tuple[str, ...]
    only_code_hashes: tuple[str, ...]
    only_reward_hashes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """The later version stands on the earlier one; `versions` lie on a way between them, oldest first."""

    earlier: str
    later: str
    num_hops: int
    versions: tuple[Ancestor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LineageDiff:
    """`between` is None if neither version stands behind the other."""

    run: str
    one: Side
    other: Side
    num_shared_versions: int
    num_shared_tasks: int
    between: Between | None
    num_files_opened: int
    num_files: int


def lineage_diff(store_root: str, run: str, one: VersionName, other: VersionName) -> LineageDiff:
    """What only one of the two versions has behind it.

    Raises: FileNotFoundError if the run has no sealed step or one of the versions was not made in it.
    """
    index = RunIndex(store_root, run)
    graph = VersionGraph(index)
    rows = [graph.find(name) for name in (one, other)]
    keys: list[VersionKey] = [(row.policy, row.version) for row in rows]
    closures = [set(hops_from(graph.sources, [key])) for key in keys]
    tasks = [tasks_of(index, closure) for closure in closures]
    prompts = task_prompts(index, set(tasks[0]) ^ set(tasks[1]))
    sides = [
        _side(graph, keys[n], closures[n], closures[1 - n], tasks[n], tasks[1 - n], prompts) for n in (0, 1)
    ]
    return LineageDiff(
        run=run,
        one=sides[0],
        other=sides[1],
        num_shared_versions=len(closures[0] & closures[1]),
        num_shared_tasks=len(set(tasks[0]) & set(tasks[1])),
        between=_between(graph, keys, closures),
        num_files=index.num_files,
        num_files_opened=index.num_files_opened,
    )


def _side(
    graph: VersionGraph,
    key: VersionKey,
    closure: set[VersionKey],
    others: set[VersionKey],
    tasks: dict[str, int],
    other_tasks: dict[str, int],
    prompts: dict[str, str],
) -> Side:
    made = [graph.rows[k] for k in closure if k in graph.rows]
    made_other = [graph.rows[k] for k in others if k in graph.rows]
    only_tasks = [
        TaskUse(task_id=task, prompt=prompts.get(task), num_samples=num)
        for task, num in sorted(tasks.items(), key=lambda item: (-item[1], item[0]))
        if task not in other_tasks
    ]
    return Side(
        policy=key[0],
        version=key[1],
        step=graph.rows[key].step,
        num_versions=len(closure),
        num_tasks=len(tasks),
        num_samples=sum(row.num_samples for row in made),
        only_versions=_listed(graph, closure - others),
        only_tasks=tuple(only_tasks),
        only_config_hashes=_only((r.config_hash for r in made), (r.config_hash for r in made_other)),
        only_code_hashes=_only((r.code_hash for r in made), (r.code_hash for r in made_other)),
        only_reward_hashes=_only((r.reward_hash for r in made), (r.reward_hash for r in made_other)),
    )


def _only(one: Iterable[str | None], other: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(sorted({h for h in one if h is not None} - set(other)))


def _listed(graph: VersionGraph, keys: Iterable[VersionKey]) -> tuple[Ancestor, ...]:
    return tuple(ancestor(graph, key) for key in sorted(keys, key=graph.age))


def _between(graph: VersionGraph, keys: list[VersionKey], closures: list[set[VersionKey]]) -> Between | None:
    """The versions that the later one reaches backward and the earlier one forward."""
    for earlier, later, behind in ((keys[0], keys[1], closures[1]), (keys[1], keys[0], closures[0])):
        if earlier in behind and earlier != later:
            forward = hops_from(graph.users, [earlier])
            inside = (set(forward) & behind) - {earlier, later}
            return Between(
                earlier=f"{earlier[0]}@{earlier[1]}",
                later=f"{later[0]}@{later[1]}",
                num_hops=forward[later],
                versions=_listed(graph, inside),
            )
    return None
