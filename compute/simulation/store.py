"""A store in memory: keeps the records of the last sealed steps, so that long simulations stay small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megloom.compute.graph.records import TABLE_OF, record_key
from megloom.compute.store.retention import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStep:
    """A sealed step: its records by table, and its snapshot."""

    step: int
    snapshot: Mapping[str, Any]
    records: dict[str, list[Any]]


class MemoryStore:
    """A `StepStore`. `num_records` counts all that was ever sealed, by table."""

    def __init__(self, *, keep_steps: int = 2) -> None:
        self._keep_steps = keep_steps
        self._open: dict[tuple[str, str], Any] = {}
        self._steps: list[int] = []
        self.sealed: list[MemoryStep] = []
        self.num_records: Counter[str] = Counter()

    def record(self, record: Any, *, step: int | None = None) -> None:
        key = (TABLE_OF[type(record)], record_key(record))
        if self._open.setdefault(key, record) != record:
            raise ValueError(f"{key[0]}: {key[1]} recorded twice with different content")

    async def flush(self) -> None:
        return None

    async def recover(self, run: str) -> None:
        return None

    async def unsealed(self) -> list[Any]:
        return list(self._open.values())

    async def keep_unsealed(self, records: Sequence[Any]) -> int:
        num_open = len(self._open)
        self._open = {(TABLE_OF[type(record)], record_key(record)): record for record in records}
        return num_open - len(self._open)

    async def seal(self, run: str, step: int, snapshot: Mapping[str, Any]) -> MemoryStep:
        if self._steps and step <= self._steps[-1]:
            raise ValueError(f"run {run}: step {step} sealed after step {self._steps[-1]}")
        records: dict[str, list[Any]] = {}
        for (table, _), record in self._open.items():
            records.setdefault(table, []).append(record)
            self.num_records[table] += 1
        self._open.clear()
        self._steps.append(step)
        self.sealed = [
            *self.sealed[1 - self._keep_steps :],
            MemoryStep(step=step, snapshot=snapshot, records=records),
        ]
        return self.sealed[-1]

    async def snapshots(self, run: str) -> list[Mapping[str, Any]]:
        return []

    async def drop_tokens(self, run: str, keep: int, *, at: str, tell: Callable[[Plan], None]) -> None:
        """Whole steps leave this store, tokens and all: `keep_steps` says when."""
