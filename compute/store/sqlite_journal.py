"""The durable journal: one SQLite file (WAL, synchronous=NORMAL) per run.

Acknowledged means durable against a killed process, not against a power loss. One row of the file is a frame:
what one flush wrote of one table and step, as an Arrow record batch, so that sealing joins frames instead of
decoding records. The file holds unsealed steps only, so it stays as small as a step. Its connection lives on
the thread of the injected `Offload`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from megloom.compute.graph.schemas import SCHEMA_VERSION, SCHEMAS, from_table
from megloom.compute.store.codec import Entry, Row, encode, to_batch, to_entries
from megloom.compute.store.errors import StoreError
from megloom.compute.store.journal import Window
from megloom.compute.store.offload import Offload

log = logging.getLogger(__name__)

FLUSH_AT_RECORDS = 2048  # one more append starts a flush by itself: about 3 MB of rows wait
MAX_WAITING_RECORDS = 65536  # about 100 MB: the disk has stalled, and failing beats filling the memory
PAGE_BYTES = 16384  # a frame is large: fewer pages to chain, half the time of SQLite's default


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Burst:
    """The rows of one table and step that one flush writes. `seqs` number records by their first append.

    Its first number is its frame's key, so that writing it twice is harmless. Grows until a flush takes it.
    """

    step: int
    table: str
    seqs: list[int]
    rows: list[Row]


class SqliteJournal:
    """A `Journal`. Flushes that overlap share one commit."""

    def __init__(self, database: _Database, offload: Offload, window: Window, next_seq: int) -> None:
        self._database, self._offload, self._window = database, offload, window
        self._open: dict[tuple[int, str], Burst] = {}  # takes appends
        self._closed: list[Burst] = []  # handed to a flush that has not succeeded yet
        self._num_waiting = 0
        self._next_seq = next_seq
        self._durable_before = next_seq  # every record with a smaller number is on disk, or dropped
        self._writing = asyncio.Lock()  # guards the move of bursts to disk
        self._forced: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, offload: Offload) -> AsyncIterator[Self]:
        """Opens or creates the file. A clean exit flushes; an exit by exception only closes.

        Raises: StoreError if the file is not a journal of this schema version.
        """
        database = await offload.run(_Database, path)
        try:
            journal = cls(database, offload, *await offload.run(database.read_window))
            try:
                yield journal
                await journal.flush()
            finally:
                if journal._forced is not None:
                    journal._forced.cancel()
        finally:
            await offload.run(database.close)

    def append(self, record: Any, step: int) -> None:
        if self._num_waiting >= MAX_WAITING_RECORDS:
            raise StoreError(f"journal {self._database.path}: {self._num_waiting} records wait for the disk")
        entry = encode(record)
        if self._window.admit(entry, step):
            self._add(entry, step)
            if self._num_waiting > FLUSH_AT_RECORDS and self._forced is None:
                self._forced = asyncio.get_running_loop().create_task(self._force(), name="journal-flush")

    def _add(self, entry: Entry, step: int) -> None:
        burst = self._open.get((step, entry.table))
        if burst is None:
            burst = self._open[step, entry.table] = Burst(step=step, table=entry.table, seqs=[], rows=[])
        burst.seqs.append(self._next_seq)
        burst.rows.append(entry.row)
        self._next_seq += 1
        self._num_waiting += 1

    async def flush(self) -> None:
        target = self._next_seq
        async with self._writing:
            if self._durable_before >= target:
                return
            durable_before = self._next_seq
            self._closed += self._open.values()  # whole bursts only: a retry writes the very same frames
            self._open = {}
            bursts = list(self._closed)
            await self._offload.run(self._database.insert, bursts)
            self._forget(bursts)
            self._durable_before = durable_before

    async def load(self, step: int | None = None) -> list[Any]:
        await self.flush()
        return await self._offload.run(self._database.read, step)

    async def rows(self, step: int) -> Mapping[str, Iterable[pa.RecordBatch]]:
        await self.flush()
        tables = await self._offload.run(self._database.tables_of, step)
        return {table: Frames(self._database, step, table) for table in tables}

    async def drop_through(self, step: int) -> int:
        async with self._writing:
            await self._offload.run(self._database.delete_through, step)
            self._forget([burst for burst in self._closed if burst.step <= step])
            for key in [key for key in self._open if key[0] <= step]:
                self._num_waiting -= len(self._open.pop(key).rows)
            return self._window.drop_through(step)

    async def keep_only(self, records: Sequence[Any]) -> int:
        await self.flush()
        async with self._writing:
            num_before = self._window.steps.total()
            window, self._window = self._window, Window()
            for record in records:
                entry = encode(record)
                if self._window.admit(entry, record.step):
                    self._add(entry, record.step)
            bursts, self._open = list(self._open.values()), {}
            self._num_waiting -= sum(len(burst.rows) for burst in bursts)
            try:
                await self._offload.run(self._database.replace, bursts)
            except BaseException:
                self._window = window
                raise
            self._durable_before = self._next_seq
            return num_before - self._window.steps.total()

    def open_steps(self) -> Mapping[int, int]:
        return self._window.steps

    def _forget(self, bursts: Iterable[Burst]) -> None:
        for burst in bursts:
            self._closed.remove(burst)
            self._num_waiting -= len(burst.rows)

    async def _force(self) -> None:
        try:
            await self.flush()
        except StoreError as error:
            log.error("journal flush failed, the next flush tries again: %s", error)
        finally:
            self._forced = None


class Frames:
    """The frames of one table and step, read from the file each time they are iterated."""

    def __init__(self, database: _Database, step: int, table: str) -> None:
        self._database, self._step, self._table = database, step, table

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._database.frames(self._step, self._table)


class _Database:
    """The SQLite file. Every method runs on the offload's thread; SQLite's errors become `StoreError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"journal {path}: {error}") from error
        try:
            self._prepare()
        except StoreError:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        self._execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file
        self._execute("PRAGMA journal_mode = WAL")
        self._execute("PRAGMA synchronous = NORMAL")
        self._execute("PRAGMA secure_delete = OFF")  # some builds overwrite what a seal deletes with zeros
        version = self._execute("PRAGMA user_version")[0][0]
        if version not in (0, SCHEMA_VERSION):
            raise StoreError(
                f"journal {self.path}: schema version {version}, expected {SCHEMA_VERSION}: seal its open"
                " step with the program that wrote it, or move the file away: the last sealed step stays"
            )
        self._execute(
            "CREATE TABLE IF NOT EXISTS frames (first INTEGER PRIMARY KEY, last INTEGER, step INTEGER,"
            " tbl TEXT, num_rows INTEGER, seqs BLOB, body BLOB)"
        )
        if version == 0:  # an old file is left alone: it opens on a full disk
            self._execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def insert(self, bursts: Sequence[Burst]) -> None:
        """One transaction: all bursts or none. Bursts that are there already stay."""
        self._write(bursts, clear=False)

    def replace(self, bursts: Sequence[Burst]) -> None:
        """Like `insert`, after everything that was there; one transaction."""
        self._write(bursts, clear=True)

    def _write(self, bursts: Sequence[Burst], *, clear: bool) -> None:
        frames = [
            (
                burst.seqs[0],
                burst.seqs[-1],
                burst.step,
                burst.table,
                len(burst.rows),
                np.array(burst.seqs, dtype=np.int64).tobytes(),
                memoryview(to_batch(burst.table, burst.rows).serialize()),
            )
            for burst in bursts
        ]
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                if clear:
                    self._connection.execute("DELETE FROM frames")
                self._connection.executemany(
                    "INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", frames
                )
        except sqlite3.Error as error:
            raise StoreError(f"journal {self.path}: {error}") from error

    def read(self, step: int | None) -> list[Any]:
        where, parameters = ("", ()) if step is None else ("WHERE step = ?", (step,))
        numbered: list[tuple[int, Any]] = []
        for table, seqs, body in self._execute(f"SELECT tbl, seqs, body FROM frames {where}", parameters):
            records = from_table(table, pa.Table.from_batches([self._batch(table, body)]))
            numbered += zip(np.frombuffer(seqs, dtype=np.int64).tolist(), records, strict=True)
        return [record for _, record in sorted(numbered, key=lambda pair: pair[0])]

    def tables_of(self, step: int) -> list[str]:
        return [
            table for (table,) in self._execute("SELECT DISTINCT tbl FROM frames WHERE step = ?", (step,))
        ]

    def frames(self, step: int, table: str) -> Iterator[pa.RecordBatch]:
        """One at a time: a step may be larger than the memory."""
        try:
            for (body,) in self._connection.execute(
                "SELECT body FROM frames WHERE step = ? AND tbl = ? ORDER BY first", (step, table)
            ):
                yield self._batch(table, body)
        except sqlite3.Error as error:
            raise StoreError(f"journal {self.path}: {error}") from error

    def read_window(self) -> tuple[Window, int]:
        """The window of what the file holds, and the next record's number."""
        window, next_seq = Window(), 0
        for last, step, table, body in self._execute(
            "SELECT last, step, tbl, body FROM frames ORDER BY first"
        ):
            for entry in to_entries(table, self._batch(table, body)):
                window.admit(entry, step)
            next_seq = max(next_seq, last + 1)
        return window, next_seq

    def delete_through(self, step: int) -> None:
        self._execute("DELETE FROM frames WHERE step <= ?", (step,))

    def close(self) -> None:
        self._connection.close()

    def _batch(self, table: str, body: bytes) -> pa.RecordBatch:
        try:
            return pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMAS[table])
        except (pa.ArrowException, OSError) as error:
            raise StoreError(f"journal {self.path}: a frame of {table} is damaged: {error}") from error

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"journal {self.path}: {error}") from error
