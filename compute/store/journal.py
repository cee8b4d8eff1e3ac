"""The write-behind journal of one run: what happened since the last sealed step.

    append (memory) → flush (durable against a killed process) → seal (Parquet) → drop_through

Appending the same record twice stores it once. A record is final: other content under a known key raises
`ConflictingRecord`. Only keys and 16-byte digests of unsealed records stay in memory. Called by `MegStore`;
the durable one is `sqlite_journal.SqliteJournal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from megloom.compute.store.codec import Entry, decode, encode
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

    async def drop_through(self, step: int) -> int:
        """Forgets the records of `step` and of earlier steps; returns how many."""
        ...

    def open_steps(self) -> Mapping[int, int]:
        """How many unsealed records each step has."""
        ...


class Window:
    """Keys and digests of the unsealed records. Written by its journal only."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[int, bytes]] = {}
        self.steps: Counter[int] = Counter()

    def admit(self, entry: Entry, step: int) -> bool:
        """Whether the entry is new.

        Raises: ConflictingRecord if its key is known with other content.
        """
        key = (entry.table, entry.key)
        known = self._known.get(key)
        if known is None:
            self._known[key] = (step, entry.digest)
            self.steps[step] += 1
            return True
        if known[1] != entry.digest:
            raise ConflictingRecord(
                f"{entry.table} {entry.key}: already recorded in step {known[0]} with other content"
            )
        return False

    def drop_through(self, step: int) -> int:
        size = len(self._known)
        self._known = {key: known for key, known in self._known.items() if known[0] > step}
        self.steps = Counter({at: num for at, num in self.steps.items() if at > step})
        return size - len(self._known)


class MemoryJournal:
    """A journal that dies with the process: simulation and tests."""

    def __init__(self) -> None:
        self._window = Window()
        self._rows: list[tuple[int, str, bytes]] = []

    def append(self, record: Any, step: int) -> None:
        entry = encode(record)
        if self._window.admit(entry, step):
            self._rows.append((step, entry.table, entry.body))

    async def flush(self) -> None:
        return

    async def load(self, step: int | None = None) -> list[Any]:
        return [decode(table, body) for at, table, body in self._rows if step is None or at == step]

    async def drop_through(self, step: int) -> int:
        self._rows = [row for row in self._rows if row[0] > step]
        return self._window.drop_through(step)

    def open_steps(self) -> Mapping[int, int]:
        return self._window.steps
