"""The write-behind journal of one run: what happened since the last sealed step.

    append (memory) → flush (durable against a killed process) → seal (Parquet) → drop_through

Appending the same record twice stores it once. A record is final: other content under a known key raises
`ConflictingRecord`. Only keys and 64-bit digests of unsealed records stay in memory. Called by `MegStore`;
the durable one is `sqlite_journal.SqliteJournal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from megloom.compute.store.codec import Entry, Row, encode, to_batch, to_records
from megloom.compute.store.errors import ConflictingRecord


class Journal(Protocol):
    """All methods are for the event loop's thread."""

    def append(self, record: Any, step: int) -> None:
        """Keeps `record` in memory under `step` (its first step, if it comes twice). Never blocks.

        Raises: ConflictingRecord if its key is known with other content; ValueError if it cannot be stored;
        StoreError if too many records wait for the disk.
        """
        ...

    async def flush(self) -> None:
        """Returns when all that was appended before the call survives a SIGKILL (not a power loss)."""
        ...

    async def load(self, step: int | None = None) -> list[Any]:
        """The unsealed records of a step, or of all steps, in order of their first append."""
        ...

    async def rows(self, step: int) -> Mapping[str, Iterable[pa.RecordBatch]]:
        """The unsealed records of a step as Arrow, by table; tables without rows are absent.

        Read as they are iterated, which is work for the `Offload`.
        """
        ...

    async def drop_through(self, step: int) -> int:
        """Forgets the records of `step` and of earlier steps; returns how many."""
        ...

    async def keep_only(self, records: Sequence[Any]) -> int:
        """Forgets every record but these, which have steps of their own; returns how many.

        All or nothing: a process that is killed meanwhile has the old records or the kept ones.
        """
        ...

    def open_steps(self) -> Mapping[int, int]:
        """How many unsealed records each step has."""
        ...


class Window:
    """Keys and digests of the unsealed records, by step. Written by its journal only."""

    def __init__(self) -> None:
        self._known: dict[int, dict[tuple[str, str], int]] = {}
        self.steps: Counter[int] = Counter()

    def admit(self, entry: Entry, step: int) -> bool:
        """Whether the entry is new.

        Raises: ConflictingRecord if its key is known with other content.
        """
        key = (entry.table, entry.key)
        for at, known in self._known.items():  # one or two steps are open
            digest = known.get(key)
            if digest is None:
                continue
            if digest != entry.digest:
                raise ConflictingRecord(
                    f"{entry.table} {entry.key}: already recorded in step {at} with other content"
                )
            return False
        self._known.setdefault(step, {})[key] = entry.digest
        self.steps[step] += 1
        return True

    def drop_through(self, step: int) -> int:
        num_dropped = 0
        for at in [at for at in self._known if at <= step]:
            del self._known[at]
            num_dropped += self.steps.pop(at)
        return num_dropped


class MemoryJournal:
    """A journal that dies with the process: simulation and tests."""

    def __init__(self) -> None:
        self._window = Window()
        self._rows: list[tuple[int, str, Row]] = []

    def append(self, record: Any, step: int) -> None:
        entry = encode(record)
        if self._window.admit(entry, step):
            self._rows.append((step, entry.table, entry.row))

    async def flush(self) -> None:
        return

    async def load(self, step: int | None = None) -> list[Any]:
        return to_records([(table, row) for at, table, row in self._rows if step is None or at == step])

    async def rows(self, step: int) -> Mapping[str, Iterable[pa.RecordBatch]]:
        rows: dict[str, list[Row]] = {}
        for at, table, row in self._rows:
            if at == step:
                rows.setdefault(table, []).append(row)
        return {table: [to_batch(table, part)] for table, part in rows.items()}

    async def drop_through(self, step: int) -> int:
        self._rows = [row for row in self._rows if row[0] > step]
        return self._window.drop_through(step)

    async def keep_only(self, records: Sequence[Any]) -> int:
        num_before = len(self._rows)
        self._window, self._rows = Window(), []
        for record in records:
            self.append(record, record.step)
        return num_before - len(self._rows)

    def open_steps(self) -> Mapping[int, int]:
        return self._window.steps
