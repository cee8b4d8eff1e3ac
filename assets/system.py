"""What the assets need to know of a trained system: its name, its policies, its agents.

Read from the workload's import string, at definition time and again when a session starts. A workload file
imports nothing heavy, so the code location stays light (a test asserts that torch is absent).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megloom.compute.importing import import_workload


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One workload. `policies` says of each policy if it is trained, `agents` maps agents to policies."""

    name: str
    policies: Mapping[str, bool]
    agents: Mapping[str, str]

    @property
    def trained_policies(self) -> list[str]:
        return [policy for policy, trained in self.policies.items() if trained]

    def agents_of(self, policy: str) -> list[str]:
        return [agent for agent, served_by in self.agents.items() if served_by == policy]


def load_system(name: str, *, import_paths: Sequence[str] = ()) -> System:
    """The description of the workload at `package.module:attribute`.

    Raises: ValueError naming what is missing, or what the import raised.
    """
    with _importable(import_paths):
        workload = import_workload(name)
    return System(
        name=workload.name,
        policies={name: policy.trained for name, policy in workload.policies.items()},
        agents={name: agent.policy for name, agent in workload.agents.items()},
    )


@contextmanager
def _importable(paths: Sequence[str]) -> Iterator[None]:
    """Puts folders in front of the import path, for the time of one import."""
    before = list(sys.path)
    sys.path[:0] = paths
    try:
        yield
    finally:
        sys.path[:] = before
