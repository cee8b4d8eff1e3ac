"""The version ledger: which weights each policy is committed to, and the rules of lag.

Pure data. μ optimizer steps a publish, φ groups dispatched ahead, α `max_off_policy_steps`; frozen and sync
modes are (1, 0, 0). A new version is always max + 1; `parent_version` is the version it was trained from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megloom.compute.scheduling.cursor import Cursor
from megloom.compute.trainers.protocol import Published


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A policy's committed weights. `state_path` is the trainer's full state that belongs to them."""

    version: int
    parent_version: int | None
    uri: str
    digest: str
    state_path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What the next step starts from; part of every step's snapshot."""

    next_step: int
    cursor: Cursor
    policies: Mapping[str, Committed]

    def versions(self) -> dict[str, int]:
        return {name: committed.version for name, committed in self.policies.items()}

    def next_version(self, policy: str) -> int:
        return self.policies[policy].version + 1

    def committed(
        self, *, cursor: Cursor, published: Mapping[str, Published], states: Mapping[str, str]
    ) -> Ledger:
        """The ledger after a step: policies in `published` move on, the others keep their version.

        Raises: ValueError if a published version is not the next one of its policy.
        """
        policies = dict(self.policies)
        for name, new in published.items():
            old = policies[name]
            if new.version != old.version + 1:
                raise ValueError(f"policy {name}: published version {new.version} after {old.version}")
            policies[name] = Committed(
                version=new.version,
                parent_version=old.version,
                uri=new.uri,
                digest=new.digest,
                state_path=None,
            )
        for name, path in states.items():
            policies[name] = replace(policies[name], state_path=path)
        return Ledger(next_step=self.next_step + 1, cursor=cursor, policies=policies)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        return cls(
            next_step=data["next_step"],
            cursor=Cursor(**data["cursor"]),
            policies={name: Committed(**entry) for name, entry in data["policies"].items()},
        )
