"""The index of one sealed step: small tables at version grain, derived from the step's own tables.

What a version is made of is sealed in the version's step. A sample whose call is not sealed there counts with
its own versions alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from megloom.compute.store.manifest import Manifest

_STR, _INT = pa.string(), pa.int64()


def _schema(**columns: pa.DataType | tuple[pa.DataType]) -> pa.Schema:
    """A type in a tuple is nullable."""
    return pa.schema(
        [
            pa.field(name, kind[0] if isinstance(kind, tuple) else kind, nullable=isinstance(kind, tuple))
            for name, kind in columns.items()
        ],
        metadata={"schema_version": "2"},
    )


INDEX_SCHEMAS: dict[str, pa.Schema] = {
    # A version made in the step. The counts are of distinct samples and tasks behind it.
    "index_versions": _schema(
        policy=_STR,
        version=_INT,
        parent_version=(_INT,),
        step=_INT,
        kind=_STR,
        digest=_STR,
        config_hash=_STR,
        code_hash=_STR,
        reward_hash=(_STR,),
        num_micro_batches=_INT,
        num_samples=_INT,
        num_tasks=_INT,
    ),
    # relation "parent": the weights that it continued from; "sampled": who generated its episodes' calls.
    "index_edges": _schema(
        policy=_STR,
        version=_INT,
        from_policy=_STR,
        from_version=_INT,
        relation=_STR,
        num_calls=(_INT,),
    ),
    "index_uses": _schema(task_id=_STR, policy=_STR, version=_INT, step=_INT, agent=_STR, num_samples=_INT),
    "index_rewards": _schema(reward_hash=_STR, policy=_STR, version=_INT, step=_INT, num_samples=_INT),
}
FILES = "index_files"  # blocks have it besides: the files of their steps, so that no manifest need be opened
BLOCK_SCHEMAS: dict[str, pa.Schema] = INDEX_SCHEMAS | {
    FILES: _schema(
        step=_INT,
        name=_STR,
        table=_STR,
        agent=(_STR,),
        num_rows=_INT,
        size_bytes=_INT,
        digest=_STR,
        schema_version=_INT,
    )
}
# What `step_index` reads of each table; a file of an older schema may lack some.
INDEX_SOURCES: dict[str, tuple[str, ...]] = {
    "policy_versions": (
        "policy", "version", "parent_version", "step", "kind",
        "digest", "config_hash", "code_hash", "reward_hash",
    ),
    "micro_batches": ("policy", "step", "base_version", "sample_ids"),
    "samples": (
        "sample_id", "policy", "agent", "episode_id", "invocation_id", "task_id",
        "version_min", "version_max",
    ),
    "invocations": (
        "invocation_id", "episode_id", "attempt", "num_reentries", "policy", "version_min", "version_max",
    ),
    "episodes": ("episode_id", "attempt", "task_id", "state", "reward_hash"),
}  # fmt: skip

VersionKey = tuple[str, int]


class _Sample(NamedTuple):  # a step has tens of thousands; a frozen dataclass takes five times as long
    policy: str
    agent: str
    episode_id: str
    invocation_id: str | None
    task_id: str | None
    version_min: int | None
    version_max: int | None


def step_index(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """The index tables of one step from its tables by name (agents concatenated; absent ones are empty)."""
    versions = list(_rows(tables, "policy_versions"))
    batches: dict[tuple[str, int, int | None], list[list[str]]] = defaultdict(list)
    for policy, step, base, ids in _rows(tables, "micro_batches"):
        batches[policy, step, base].append(ids)
    samples = {row[0]: _Sample(*row[1:]) for row in _rows(tables, "samples")}
    tasks, hashes = _episodes(tables)
    calls = _Calls(tables)
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in INDEX_SCHEMAS}
    for policy, version, parent, step, *rest, reward_hash in versions:
        taken = batches[policy, step, parent] if parent is not None else []
        ids = dict.fromkeys(name for batch in taken for name in batch if name in samples)
        own = [samples[name] for name in ids]
        uses = Counter((s.task_id or tasks.get(s.episode_id), s.agent) for s in own)
        rewards = Counter(hashes[s.episode_id] for s in own if hashes.get(s.episode_id))
        used = {task for task, _ in uses if task is not None}
        rows["index_versions"].append(
            (policy, version, parent, step, *rest, reward_hash or None, len(taken), len(own), len(used))
        )
        if parent is not None:
            rows["index_edges"].append((policy, version, policy, parent, "parent", None))
        rows["index_edges"] += [
            (policy, version, *source, "sampled", num) for source, num in calls.behind(own).items()
        ]
        rows["index_uses"] += [
            (task, policy, version, step, agent, num)
            for (task, agent), num in uses.items()
            if task is not None
        ]
        rows["index_rewards"] += [(key, policy, version, step, num) for key, num in rewards.items()]
    return {name: _table(name, rows[name]) for name in INDEX_SCHEMAS}


def files_table(manifest: Manifest) -> pa.Table:
    """The files that a step's manifest names, as rows of `FILES`."""
    rows = [
        (
            manifest.step,
            file.name,
            file.table,
            file.agent,
            file.num_rows,
            file.size_bytes,
            file.digest,
            manifest.schema_version,
        )
        for file in manifest.files
    ]
    return _table(FILES, rows)


def sorted_index(table: pa.Table) -> pa.Table:
    """The table in the index's order: by all its columns, the leading key first."""
    return table.sort_by([(column, "ascending") for column in table.column_names])


class _Calls:
    """The calls of a step by episode attempt: only those of a sample's own attempt stand behind it."""

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        self._of: dict[tuple[str, int | None], list[tuple[str, int, int]]] = defaultdict(list)
        self._attempts: dict[str, int | None] = {}
        for name, episode, attempt, reentries, policy, low, high in _rows(tables, "invocations"):
            if reentries is None:
                attempt = None  # schema 1 counted the call's own attempts in this column
            self._attempts[name] = attempt
            if low is not None:
                self._of[episode, attempt].append((policy, low, high))

    def behind(self, samples: Iterable[_Sample]) -> Counter[VersionKey]:
        """How many calls of the samples' episodes each version answered; a call of two counts for both."""
        spans: Counter[tuple[str, int, int]] = Counter()
        attempts = set()
        for sample in samples:
            if sample.invocation_id in self._attempts:
                attempts.add((sample.episode_id, self._attempts[sample.invocation_id]))
            elif sample.version_min is not None:
                high = sample.version_min if sample.version_max is None else sample.version_max
                spans[sample.policy, sample.version_min, high] += 1
        for key in attempts:
            spans.update(self._of.get(key, ()))
        counts: Counter[VersionKey] = Counter()
        for (policy, low, high), num in spans.items():
            for version in range(low, high + 1):
                counts[policy, version] += num
        return counts


def _episodes(tables: Mapping[str, pa.Table]) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Task and reward hash of each episode; the scored attempt stands for it, else the first."""
    order = sorted(_rows(tables, "episodes"), key=lambda row: (row[0], row[3] != "scored", row[1]))
    tasks: dict[str, str | None] = {}
    hashes: dict[str, str | None] = {}
    for episode, _, task, _, reward_hash in order:
        tasks.setdefault(episode, task)
        hashes.setdefault(episode, reward_hash)
    return tasks, hashes


def _rows(tables: Mapping[str, pa.Table], name: str) -> Iterator[tuple[Any, ...]]:
    """The rows of the columns in `INDEX_SOURCES`; None in a column that the table lacks."""
    table = tables.get(name)
    if table is None:
        return iter(())
    nothing = [None] * table.num_rows
    return zip(
        *(
            table.column(column).to_pylist() if column in table.column_names else nothing
            for column in INDEX_SOURCES[name]
        ),
        strict=True,
    )


def _table(name: str, rows: list[tuple[Any, ...]]) -> pa.Table:
    schema = BLOCK_SCHEMAS[name]
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(column, type=f.type) for column, f in zip(columns, schema, strict=True)]
    return sorted_index(pa.Table.from_arrays(arrays, schema=schema))
