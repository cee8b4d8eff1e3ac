"""What made a policy version: its micro-batches, samples, tasks, and the versions that sampled them.

Rows are kept for direct relations; the closure back to version 0 is computed at version grain, with counts.
A version is made by the micro-batches of its policy and step that were taken on its parent. The versions of
*every* policy that took part in those samples' episodes influenced it, not only those of its own policy.
Reads sealed steps through an in-memory DuckDB. Synchronous; the CLI, Dagster and users' SQL call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import duckdb

from megloom.compute.graph.records import RECORDS, MicroBatchRecord, PolicyVersionRecord
from megloom.compute.graph.schemas import SCHEMAS
from megloom.compute.store.reader import MegReader


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectSample:
    """A training row of the version. `reward` is its call's, else its episode's; None where there is none."""

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
class VersionEdge:
    """`relation` "parent": the weights it continued from. "sampled": it generated calls of its episodes.

    `num_calls` is None for a parent.
    """

    policy: str
    version: int
    from_policy: str
    from_version: int
    relation: str
    num_calls: int | None


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
    """Everything behind one version. `ancestors` starts with the version itself, then newest step first."""

    row: PolicyVersionRecord
    micro_batches: tuple[MicroBatchRecord, ...] = field(default=())
    sample_counts: tuple[SampleCount, ...] = field(default=())
    samples: tuple[DirectSample, ...] = field(default=())
    tasks: tuple[TaskUse, ...] = field(default=())
    sampled_by: tuple[VersionEdge, ...] = field(default=())
    ancestors: tuple[Ancestor, ...] = field(default=())
    edges: tuple[VersionEdge, ...] = field(default=())


# Only the columns that lineage needs: token arrays stay on disk.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "tasks": ("task_id", "prompt"),
    "episodes": ("episode_id", "attempt", "task_id", "state", "reward"),
    "invocations": ("invocation_id", "episode_id", "policy", "version_min", "version_max", "reward"),
    "samples": (
        "sample_id",
        "step",
        "kind",
        "agent",
        "policy",
        "episode_id",
        "invocation_id",
        "advantage",
        "version_min",
    ),
    "micro_batches": tuple(SCHEMAS["micro_batches"].names),
    "policy_versions": tuple(SCHEMAS["policy_versions"].names),
}

# An episode may have several attempts; the scored one stands for it, else the first.
_DERIVED = """
create table made as
select v.policy, v.version, m.micro_batch_id, unnest(m.sample_ids) as sample_id
from policy_versions v join micro_batches m
  on m.policy = v.policy and m.step = v.step and m.base_version = v.parent_version;

create table attempts as
select distinct on (episode_id) episode_id, task_id, reward from episodes
order by episode_id, (state = 'scored') desc, attempt;

create table rows as
select made.policy, made.version, s.sample_id, s.step, s.kind, s.agent, a.task_id, s.episode_id,
  s.invocation_id, s.advantage, coalesce(i.reward, a.reward) as reward,
  coalesce(i.version_min, s.version_min) as sampled_by_min,
  coalesce(i.version_max, s.version_min) as sampled_by_max
from made join samples s using (sample_id)
left join attempts a using (episode_id)
left join invocations i on i.invocation_id = s.invocation_id;

create table edges_of_versions as
select policy, version, policy as from_policy, parent_version as from_version,
  'parent' as relation, null::bigint as num_calls
from policy_versions where parent_version is not null
union all
select e.policy, e.version, i.policy, w.from_version, 'sampled', count(distinct i.invocation_id)
from (select distinct policy, version, episode_id from rows) e
join invocations i using (episode_id), unnest(range(i.version_min, i.version_max + 1)) w(from_version)
where i.version_min is not null
group by all;
"""

_CLOSURE = """
create or replace temp table closure as
with recursive up(policy, version) as (
  select $policy, $version::bigint
  union
  select e.from_policy, e.from_version from up join edges_of_versions e using (policy, version)
)
select * from up
"""


def parse_version(name: str) -> tuple[str, int | Literal["last"]]:
    """The policy and version of `solver@17` or `solver@last`.

    Raises: ValueError for any other form.
    """
    policy, at, version = name.partition("@")
    if not (policy and at) or not (version == "last" or version.isdecimal()):
        raise ValueError(f"version {name!r}: expected <policy>@<number> or <policy>@last")
    return policy, "last" if version == "last" else int(version)


def views(con: duckdb.DuckDBPyConnection, root: str, run: str, tables: Sequence[str] | None = None) -> None:
    """Registers a run's sealed tables (all if None) as views of the same names, for any SQL.

    Raises: FileNotFoundError if the run has no sealed step; CorruptFile for a damaged file.
    """
    reader = MegReader(root)
    steps = reader.sealed_steps(run)
    for table in tables or RECORDS:
        con.register(table, reader.read_table(run, table, steps))


def version_lineage(store_root: str, run: str, policy: str, version: int | Literal["last"]) -> VersionLineage:
    """Everything behind `run/policy@version`; "last" is the newest version.

    Raises: FileNotFoundError if the run has no sealed step or no such version.
    """
    with duckdb.connect(":memory:") as con:
        _load(con, store_root, run)
        row = _version_row(con, run, policy, version)
        of = {"policy": policy, "version": row.version}
        here = "where policy = $policy and version = $version"
        con.execute(_CLOSURE, of)
        edges = _records(
            con,
            VersionEdge,
            "select e.* from edges_of_versions e join closure using (policy, version)"
            " order by e.version desc, e.policy, relation, from_policy, from_version desc",
        )
        return VersionLineage(
            row=row,
            micro_batches=_records(
                con,
                MicroBatchRecord,
                "select m.* from micro_batches m where micro_batch_id in"
                f" (select micro_batch_id from made {here}) order by position",
                of,
            ),
            sample_counts=_records(
                con,
                SampleCount,
                f"select agent, step, kind, count(*) as num_samples from rows {here}"
                " group by all order by agent, step, kind",
                of,
            ),
            samples=_records(
                con,
                DirectSample,
                f"select * exclude (policy, version) from rows {here} order by sample_id",
                of,
            ),
            tasks=_records(
                con,
                TaskUse,
                "select task_id, any_value(t.prompt) as prompt, count(distinct sample_id) as num_samples"
                f" from rows left join tasks t using (task_id) {here} and task_id is not null"
                " group by task_id order by num_samples desc, task_id",
                of,
            ),
            sampled_by=tuple(
                e for e in edges if (e.policy, e.version, e.relation) == (policy, row.version, "sampled")
            ),
            ancestors=_ancestors(con, of),
            edges=edges,
        )


def _load(con: duckdb.DuckDBPyConnection, root: str, run: str) -> None:
    reader = MegReader(root)
    steps = reader.sealed_steps(run)
    for table, columns in _COLUMNS.items():
        con.register(table, reader.read_table(run, table, steps, columns))
    con.execute(_DERIVED)


def _version_row(
    con: duckdb.DuckDBPyConnection, run: str, policy: str, version: int | Literal["last"]
) -> PolicyVersionRecord:
    rows = _records(
        con,
        PolicyVersionRecord,
        "select * from policy_versions where policy = $policy order by version",
        {"policy": policy},
    )
    chosen = rows[-1:] if version == "last" else [row for row in rows if row.version == version]
    if not chosen:
        known = f"versions {rows[0].version} to {rows[-1].version}" if rows else "no version of this policy"
        raise FileNotFoundError(f"no version {run}/{policy}@{version} in sealed steps (there: {known})")
    return chosen[0]


def _ancestors(con: duckdb.DuckDBPyConnection, of: dict[str, Any]) -> tuple[Ancestor, ...]:
    return _records(
        con,
        Ancestor,
        "select c.policy, c.version, any_value(v.step) as step, any_value(v.kind) as kind,"
        " count(distinct r.sample_id) as num_samples, count(distinct r.task_id) as num_tasks"
        " from closure c left join policy_versions v using (policy, version)"
        " left join rows r using (policy, version) group by c.policy, c.version"
        " order by (c.policy = $policy and c.version = $version) desc, step desc nulls last,"
        " c.policy, c.version desc",
        of,
    )


def _records(
    con: duckdb.DuckDBPyConnection, record: type, sql: str, parameters: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    """The rows of `sql` as records; column names equal field names."""
    result = con.execute(sql, parameters or {})
    names = [column[0] for column in result.description]
    return tuple(record(**dict(zip(names, row, strict=True))) for row in result.fetchall())
