"""What the assets need to know of a trained system: its name, its policies, its agents.

Read from the workload's import string, at definition time and again when a session starts. A workload file
imports nothing heavy, so the code location stays light (a test asserts that torch is absent).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megloom.compute.workload import Workload


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

    Not `rollout.loading`, which brings pyarrow along: a second of import in each of Dagster's processes.

    Raises: ValueError naming what is missing, or what the import raised.
    """
    module_name, _, attribute = name.partition(":")
    try:
        with _importable(import_paths):
            workload = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # the boundary of user code: a broken system file is bad input
        raise ValueError(f"workload {name}: {type(error).__name__}: {error}") from error
    if not isinstance(workload, Workload):
        raise ValueError(f"workload {name}: expected a Workload, found {type(workload).__name__}")
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
