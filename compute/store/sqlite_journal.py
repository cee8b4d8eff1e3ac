"""The durable journal: one SQLite file (WAL, synchronous=NORMAL) per run.

Acknowledged means durable against a killed process, not against a power loss. The file holds unsealed steps
only, so it stays as small as a step. Its connection lives on the thread of the injected `Offload`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from megloom.compute.graph.schemas import SCHEMA_VERSION
from megloom.compute.store.codec import Entry, content_digest, decode, encode
from megloom.compute.store.errors import StoreError
from megloom.compute.store.journal import Window
from megloom.compute.store.offload import Offload

log = logging.getLogger(__name__)

FLUSH_AT_RECORDS = 2048  # one more append starts a flush by itself: about 3 MB of bodies wait
MAX_WAITING_RECORDS = 65536  # about 100 MB: the disk has stalled, and failing beats filling the memory

_Row = tuple[str, int, str, bytes]


class SqliteJournal:
    """A `Journal`. Flushes that overlap share one commit."""

    def __init__(self, database: _Database, offload: Offload, window: Window) -> None:
        self._database, self._offload, self._window = database, offload, window
        self._waiting: list[_Row] = []
        self._num_appended = 0
        self._num_durable = 0
        self._writing = asyncio.Lock()  # guards the move of `_waiting` to disk
        self._forced: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, offload: Offload) -> AsyncIterator[Self]:
        """Opens or creates the file. A clean exit flushes; an exit by exception only closes.

        Raises: StoreError if the file is not a journal of this schema version.
        """
        database = await offload.run(_Database, path)
        try:
            journal = cls(database, offload, await offload.run(database.read_window))
            try:
                yield journal
                await journal.flush()
            finally:
                if journal._forced is not None:
                    journal._forced.cancel()
        finally:
            await offload.run(database.close)

    def append(self, record: Any, step: int) -> None:
        if len(self._waiting) >= MAX_WAITING_RECORDS:
            raise StoreError(f"journal {self._database.path}: {len(self._waiting)} records wait for the disk")
        entry = encode(record)
        if not self._window.admit(entry, step):
            return
        self._waiting.append((entry.table, step, entry.key, entry.body))
        self._num_appended += 1
        if len(self._waiting) > FLUSH_AT_RECORDS and self._forced is None:
            self._forced = asyncio.get_running_loop().create_task(self._force(), name="journal-flush")

    async def flush(self) -> None:
        target = self._num_appended
        async with self._writing:
            if self._num_durable >= target:
                return
            rows, self._waiting = self._waiting, []
            try:
                await self._offload.run(self._database.insert, rows)
            except BaseException:
                self._waiting = rows + self._waiting  # writing twice is harmless: keys are idempotent
                raise
            self._num_durable += len(rows)

    async def load(self, step: int | None = None) -> list[Any]:
        await self.flush()
        return await self._offload.run(self._database.read, step)

    async def drop_through(self, step: int) -> int:
        await self.flush()
        await self._offload.run(self._database.delete_through, step)
        return self._window.drop_through(step)

    def open_steps(self) -> Mapping[int, int]:
        return self._window.steps

    async def _force(self) -> None:
        try:
            await self.flush()
        except StoreError as error:
            log.error("journal flush failed, the next flush tries again: %s", error)
        finally:
            self._forced = None


class _Database:
    """The SQLite file. Every method runs on the offload's thread; SQLite's errors become `StoreError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, isolation_level=None)
        try:
            self._prepare()
        except StoreError:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        self._execute("PRAGMA journal_mode = WAL")
        self._execute("PRAGMA synchronous = NORMAL")
        version = self._execute("PRAGMA user_version")[0][0]
        if version not in (0, SCHEMA_VERSION):
            raise StoreError(f"journal {self.path}: schema version {version}, expected {SCHEMA_VERSION}")
        self._execute(
            "CREATE TABLE IF NOT EXISTS records"
            " (tbl TEXT, step INTEGER, key TEXT, body BLOB, PRIMARY KEY (tbl, key))"
        )
        self._execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def insert(self, rows: list[_Row]) -> None:
        """One transaction: all rows or none."""
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany(
                    "INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", rows
                )
        except sqlite3.Error as error:
            raise StoreError(f"journal {self.path}: {error}") from error

    def read(self, step: int | None) -> list[Any]:
        where, parameters = ("", ()) if step is None else ("WHERE step = ?", (step,))
        rows = self._execute(f"SELECT tbl, body FROM records {where} ORDER BY rowid", parameters)
        return [decode(table, body) for table, body in rows]

    def read_window(self) -> Window:
        window = Window()
        for table, step, key, body in self._execute("SELECT * FROM records ORDER BY rowid"):
            window.admit(Entry(table=table, key=key, body=body, digest=content_digest(body)), step)
        return window

    def delete_through(self, step: int) -> None:
        self._execute("DELETE FROM records WHERE step <= ?", (step,))

    def close(self) -> None:
        self._connection.close()

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"journal {self.path}: {error}") from error
