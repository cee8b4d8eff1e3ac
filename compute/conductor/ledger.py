"""The version ledger: which weights each policy is committed to, and the rules of lag.

Pure data. μ optimizer steps a publish, φ groups dispatched ahead, α `max_off_policy_steps`; frozen and sync
modes are (1, 0, 0). A new version is one above the highest that the policy ever had, also after a rollback:
no number is used twice. `parent_version` is the version it was trained from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megloom.compute.scheduling.cursor import Cursor
from megloom.compute.trainers.protocol import Published


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A policy's committed weights. `state_path` is the trainer's full state that belongs to them.

    `max_version` is the highest version that the policy ever had, if that is another than this one.
    `old_states` are (version, path) of further trainer states that are kept, newest version first.
    """

    version: int
    parent_version: int | None
    uri: str
    digest: str
    state_path: str | None
    max_version: int | None = None
    old_states: tuple[tuple[int, str], ...] = ()

    @property
    def highest(self) -> int:
        """No version above it was ever committed."""
        return self.version if self.max_version is None else self.max_version

    def states(self) -> dict[int, str]:
        """The kept trainer states by version."""
        mine = {} if self.state_path is None else {self.version: self.state_path}
        return {**mine, **dict(self.old_states)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The version that a policy's KL term holds it to."""

    version: int
    uri: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What the next step starts from; part of every step's snapshot.

    `algorithm_states` has what a policy's algorithm carries from step to step, such as a running baseline.
    """

    next_step: int
    cursor: Cursor
    policies: Mapping[str, Committed]
    algorithm_states: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    references: Mapping[str, Reference] = field(default_factory=dict)

    def versions(self) -> dict[str, int]:
        return {name: committed.version for name, committed in self.policies.items()}

    def next_version(self, policy: str) -> int:
        return self.policies[policy].highest + 1

    def committed(
        self,
        *,
        cursor: Cursor,
        published: Mapping[str, Published],
        states: Mapping[str, str],
        algorithm_states: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Ledger:
        """The ledger after a step: policies in `published` move on, the others keep their version.

        Raises: ValueError if a published version is not the next one of its policy.
        """
        policies = dict(self.policies)
        for name, new in published.items():
            old = policies[name]
            if new.version != old.highest + 1:
                raise ValueError(f"policy {name}: published version {new.version} after {old.highest}")
            policies[name] = Committed(
                version=new.version,
                parent_version=old.version,
                uri=new.uri,
                digest=new.digest,
                state_path=None,
                old_states=_newest_first(old.states()),
            )
        for name, path in states.items():
            policies[name] = replace(policies[name], state_path=path)
        return Ledger(
            next_step=self.next_step + 1,
            cursor=cursor,
            policies=policies,
            algorithm_states={**self.algorithm_states, **(algorithm_states or {})},
            references=self.references,
        )

    def referring(self, policies: Collection[str]) -> Ledger:
        """The ledger in which today's versions of `policies` are their references from now on."""
        return replace(
            self,
            references={
                name: Reference(version=entry.version, uri=entry.uri)
                for name, entry in self.policies.items()
                if name in policies
            },
        )

    def rolled_back(self, policy: str, to: Published, *, parent_version: int | None) -> Ledger:
        """The ledger with `policy` on an older version, with that version's trainer state if one is kept.

        It takes a step's number, so that it is sealed in order with the others. What the policy's algorithm
        carries belongs to the line that is left, and is kept of no version: it begins anew.
        Raises: ValueError if the policy stands on that version, or never had it.
        """
        old = self.policies[policy]
        if to.version == old.version or not 0 <= to.version <= old.highest:
            there = f"on version {old.version}, had 0 to {old.highest}"
            raise ValueError(f"policy {policy}: cannot roll back to version {to.version} ({there})")
        states = old.states()
        state_path = states.pop(to.version, None)
        back = Committed(
            version=to.version,
            parent_version=parent_version,
            uri=to.uri,
            digest=to.digest,
            state_path=state_path,
            max_version=old.highest,
            old_states=_newest_first(states),
        )
        return replace(
            self,
            next_step=self.next_step + 1,
            policies={**self.policies, policy: back},
            algorithm_states={name: own for name, own in self.algorithm_states.items() if name != policy},
        )

    def keeping(self, keep_states: int, pinned: Mapping[str, Collection[int]]) -> tuple[Ledger, list[str]]:
        """The ledger with the newest `keep_states` trainer states of each policy, its own among them, and
        those of pinned versions; then the paths of the states that it lets go.
        """
        policies, dropped = {}, []
        for name, entry in self.policies.items():
            kept = entry.old_states[: keep_states - 1]
            kept += tuple(e for e in entry.old_states[keep_states - 1 :] if e[0] in pinned.get(name, ()))
            dropped += [path for version, path in entry.old_states if (version, path) not in kept]
            policies[name] = replace(entry, old_states=kept)
        return replace(self, policies=policies), dropped

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        return cls(
            next_step=data["next_step"],
            cursor=Cursor(**data["cursor"]),
            policies={name: _committed(entry) for name, entry in data["policies"].items()},
            algorithm_states=data.get("algorithm_states", {}),
            references={name: Reference(**entry) for name, entry in data.get("references", {}).items()},
        )


def _committed(data: Mapping[str, Any]) -> Committed:
    states = tuple((version, path) for version, path in data.get("old_states", ()))
    return Committed(**{**data, "old_states": states})


def _newest_first(states: Mapping[int, str]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted(states.items(), reverse=True))
