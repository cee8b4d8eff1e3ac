"""The versions of a run as a graph, from its index: what each was made on, and what was made on it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megloom.compute.store.lineage.run_index import RunIndex, did_you_mean

VersionKey = tuple[str, int]
VersionName = tuple[str, int | Literal["last"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRow:
    """A version as the index knows it. The counts are of distinct samples and tasks directly behind it."""

    policy: str
    version: int
    parent_version: int | None
    step: int
    kind: str
    digest: str
    config_hash: str
    code_hash: str
    reward_hash: str | None
    num_micro_batches: int
    num_samples: int
    num_tasks: int


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

    @property
    def made(self) -> VersionKey:
        return self.policy, self.version

    @property
    def source(self) -> VersionKey:
        return self.from_policy, self.from_version


class VersionGraph:
    """All versions and edges of a run. A policy that is not trained in it has edges and no row."""

    def __init__(self, index: RunIndex) -> None:
        self._run = index.run
        self.rows: dict[VersionKey, VersionRow] = {
            (row["policy"], row["version"]): VersionRow(**row)
            for row in index.table("index_versions").to_pylist()
        }
        self.edges: dict[VersionKey, list[VersionEdge]] = defaultdict(list)
        table = index.table("index_edges")
        for values in zip(*(column.to_pylist() for column in table.columns), strict=True):
            edge = VersionEdge(**dict(zip(table.column_names, values, strict=True)))
            self.edges[edge.made].append(edge)
        for edges in self.edges.values():
            edges.sort(key=lambda e: (e.relation, e.from_policy, -e.from_version))

    @cached_property
    def sources(self) -> dict[VersionKey, list[VersionKey]]:
        """Each version's neighbours on the way back."""
        return {made: [e.source for e in edges] for made, edges in self.edges.items()}

    @cached_property
    def users(self) -> dict[VersionKey, list[VersionKey]]:
        """Each version's neighbours on the way forward, oldest first."""
        users: dict[VersionKey, list[VersionKey]] = defaultdict(list)
        for made in sorted(self.edges, key=self.age):
            for source in dict.fromkeys(self.sources[made]):
                users[source].append(made)
        return users

    def age(self, key: VersionKey) -> tuple[int, str, int]:
        """Sorts versions by step; those that no step of the run made come first."""
        row = self.rows.get(key)
        return (-1 if row is None else row.step, *key)

    def find(self, name: VersionName) -> VersionRow:
        """The row of a version; "last" is the newest.

        Raises: FileNotFoundError, naming what there is, if it was not made in a sealed step.
        """
        policy, version = name
        known = sorted(row.version for row in self.rows.values() if row.policy == policy)
        chosen = (known[-1] if known else -1) if version == "last" else version
        if (policy, chosen) in self.rows:
            return self.rows[policy, chosen]
        if known:
            there = f"there: versions {known[0]} to {known[-1]}"
        else:
            policies = sorted({row.policy for row in self.rows.values()})
            there = f"there is no version of this policy{did_you_mean(policy, policies)}"
        raise FileNotFoundError(f"no version {self._run}/{policy}@{version} in sealed steps ({there})")


def parse_version(name: str) -> VersionName:
    """The policy and version of `solver@17` or `solver@last`.

    Raises: ValueError for any other form.
    """
    policy, at, version = name.partition("@")
    if not (policy and at) or not (version == "last" or version.isdecimal()):
        raise ValueError(f"version {name!r}: expected <policy>@<number> or <policy>@last")
    return policy, "last" if version == "last" else int(version)
