"""The cluster as the conductor sees it: named processes that start, end and are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """A process to start: `entry` ("module:function") is called with `args` (plain data)."""

    name: str
    entry: str
    args: dict[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """A process ended. `code` is negative for a signal; `log_tail` holds its last lines."""

    name: str
    pid: int
    code: int
    log_tail: str


class ClusterError(Exception):
    """A process could not be started or did not answer."""


class Cluster(Protocol):
    """Owns processes. Leaving it kills all of them."""

    async def start(self, spec: ProcessSpec) -> int:
        """Starts a process and returns its pid. Raises: ClusterError, also for a name that runs already."""
        ...

    async def kill(self, name: str, *, grace_s: float) -> None:
        """Ends a process and its children: SIGTERM, after `grace_s` SIGKILL. Unknown names are ignored."""
        ...

    def watch(self, prefix: str) -> asyncio.Queue[Exit]:
        """The exits, from now on, of processes whose name starts with `prefix`."""
        ...

    async def close(self) -> None: ...
