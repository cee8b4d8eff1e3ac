"""The store as the step loop needs it: final records in, one snapshot per sealed step, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from megloom.compute.store.retention import Plan


class Sealed(Protocol):
    """A sealed step: what its snapshot says."""

    @property
    def snapshot(self) -> Mapping[str, Any]: ...


class StepStore(Protocol):
    """Implemented by `MegStore`, and by memory in simulation."""

    def record(self, record: Any, *, step: int | None = None) -> None:
        """Journals a final record under `step`, by default its own. Cheap, never blocks."""
        ...

    async def flush(self) -> None:
        """Returns when all that was recorded before is durable."""
        ...

    async def recover(self, run: str) -> Sealed | None:
        """The last sealed step, None for a new run. Called before the first `record`."""
        ...

    async def unsealed(self) -> list[Any]:
        """The records of the open step that survived, in order."""
        ...

    async def keep_unsealed(self, records: Sequence[Any]) -> int:
        """Drops all records of the open step but these, all or nothing; how many."""
        ...

    async def seal(self, run: str, step: int, snapshot: Mapping[str, Any]) -> Sealed:
        """Makes the step's records and its snapshot permanent, all or nothing."""
        ...

    async def snapshots(self, run: str) -> list[Mapping[str, Any]]:
        """The snapshot of every sealed step, in order."""
        ...

    async def drop_tokens(self, run: str, keep: int, *, at: str, tell: Callable[[Plan], None]) -> None:
        """Drops the tokens of all but the newest `keep` versions; `tell` hears first of what goes."""
        ...
