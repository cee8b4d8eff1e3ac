"""The node's metadata: which objects there are, where their copies lie, who keeps them. One SQLite file.

One process per node opens it: a lock on a file beside it says who, and ends with that process. All methods
run on one thread, that of the store's `Offload`. A row exists only after its file is whole and in its place.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megloom.compute.state.errors import StateError
from megloom.compute.state.keys import Key
from megloom.compute.state.tiers import Tier

SCHEMA_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS objects (
    key TEXT PRIMARY KEY, digest TEXT NOT NULL, size_bytes INTEGER NOT NULL, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS copies (
    key TEXT, tier TEXT, name TEXT NOT NULL, mtime_ns INTEGER, inode INTEGER, used INTEGER NOT NULL,
    PRIMARY KEY (key, tier));
CREATE TABLE IF NOT EXISTS pins (key TEXT, holder TEXT, PRIMARY KEY (key, holder));
CREATE TABLE IF NOT EXISTS leases (key TEXT, holder TEXT, expires_s REAL NOT NULL, PRIMARY KEY (key, holder));
CREATE TABLE IF NOT EXISTS hosts (run TEXT, policy TEXT, node TEXT, noted INTEGER, PRIMARY KEY (run, policy));
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What the store knows of an object. `digest` is `digests.file_digest` of its bytes."""

    key: Key
    digest: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRow:
    """A copy's file, `name` under its tier's root; of a local file also what `stat` said when it was made.

    `used` grows with every use of any copy: the order of least recent use.
    """

    key: Key
    tier: Tier
    name: str
    mtime_ns: int | None
    inode: int | None
    used: int


class Index:
    """Opens or creates the file at `path`.

    Raises: StateError if another process has it open, or if it is not such an index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path.with_suffix(".lock"))
        try:
            self._connection = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            os.close(self._lock)
            raise StateError(f"state index {path}: {error}") from error
        try:
            self._prepare()
        except StateError:
            self.close()
            raise
        self._used = self._rows("SELECT max(m) FROM (SELECT max(used) m FROM copies"
                                " UNION ALL SELECT max(noted) FROM hosts)")[0][0] or 0  # fmt: skip

    def _prepare(self) -> None:
        self._rows("PRAGMA journal_mode = WAL")
        self._rows("PRAGMA synchronous = NORMAL")
        version = self._rows("PRAGMA user_version")[0][0]
        if version not in (0, SCHEMA_VERSION):
            raise StateError(f"state index {self.path}: schema version {version}, expected {SCHEMA_VERSION}")
        with self._transaction():
            for statement in _TABLES.split(";"):
                self._rows(statement)
            self._rows(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)

    def entry(self, key: Key) -> Entry | None:
        for digest, size_bytes in self._rows(
            "SELECT digest, size_bytes FROM objects WHERE key = ?", (str(key),)
        ):
            return Entry(key=key, digest=digest, size_bytes=size_bytes)
        return None

    def entries(self) -> list[Entry]:
        """All objects, by key; also those whose copies are all gone."""
        rows = self._rows("SELECT key, digest, size_bytes FROM objects ORDER BY key")
        return [Entry(key=Key.parse(key), digest=digest, size_bytes=size) for key, digest, size in rows]

    def copies(self, key: Key | None = None) -> list[CopyRow]:
        """The copies of one object, or of all."""
        where, values = ("", ()) if key is None else (" WHERE key = ?", (str(key),))
        return [
            CopyRow(key=Key.parse(name), tier=Tier(tier), name=file, mtime_ns=mtime, inode=inode, used=used)
            for name, tier, file, mtime, inode, used in self._rows(
                f"SELECT key, tier, name, mtime_ns, inode, used FROM copies{where} ORDER BY key, tier", values
            )
        ]

    def add(self, entry: Entry, copy: CopyRow, now_s: float) -> None:
        """A new copy, and its object if it is the first; one transaction."""
        with self._transaction():
            self._rows(
                "INSERT INTO objects VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (str(entry.key), entry.digest, entry.size_bytes, now_s),
            )
            self._add_copy(copy)

    def move(self, key: Key, source: Tier, copy: CopyRow | None) -> None:
        """Replaces the copy in `source` by `copy`, None if another tier has one; one transaction."""
        with self._transaction():
            self._rows("DELETE FROM copies WHERE key = ? AND tier = ?", (str(key), source))
            if copy is not None:
                self._add_copy(copy)

    def touch(self, key: Key) -> None:
        """All copies of the object were used just now."""
        self._rows("UPDATE copies SET used = ? WHERE key = ?", (self.next_use(), str(key)))

    def next_use(self) -> int:
        self._used += 1
        return self._used

    def forget(self, key: Key) -> None:
        """Deletes the object, its copies, pins and leases; one transaction."""
        with self._transaction():
            for table in ("objects", "copies", "pins", "leases"):
                self._rows(f"DELETE FROM {table} WHERE key = ?", (str(key),))

    def pin(self, key: Key, holder: str) -> None:
        self._rows("INSERT INTO pins VALUES (?, ?) ON CONFLICT DO NOTHING", (str(key), holder))

    def unpin(self, key: Key, holder: str) -> None:
        self._rows("DELETE FROM pins WHERE key = ? AND holder = ?", (str(key), holder))

    def lease(self, key: Key, holder: str, expires_s: float) -> None:
        """Sets the holder's lease; an earlier one of the same holder is replaced."""
        self._rows("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (str(key), holder, expires_s))

    def release(self, key: Key, holder: str) -> None:
        self._rows("DELETE FROM leases WHERE key = ? AND holder = ?", (str(key), holder))

    def keepers(self, now_s: float, key: Key | None = None) -> dict[Key, list[str]]:
        """Who keeps which objects: pins, and leases that end after `now_s`. Ended leases are deleted."""
        self._rows("DELETE FROM leases WHERE expires_s <= ?", (now_s,))
        found: dict[Key, list[str]] = {}
        for name, holder in self._rows(
            "SELECT key, 'pin ' || holder FROM pins UNION ALL SELECT key, 'lease ' || holder FROM leases"
        ):
            if key is None or name == str(key):
                found.setdefault(Key.parse(name), []).append(holder)
        return found

    def note_host(self, run: str, policy: str, node: str) -> None:
        self._rows("INSERT OR REPLACE INTO hosts VALUES (?, ?, ?, ?)", (run, policy, node, self.next_use()))

    def last_host(self, policy: str, run: str | None) -> str | None:
        rows = self._rows(
            "SELECT node FROM hosts WHERE policy = ? AND (? IS NULL OR run = ?) ORDER BY noted DESC LIMIT 1",
            (policy, run, run),
        )
        return str(rows[0][0]) if rows else None

    def _add_copy(self, copy: CopyRow) -> None:
        self._rows(
            "INSERT OR REPLACE INTO copies VALUES (?, ?, ?, ?, ?, ?)",
            (str(copy.key), copy.tier, copy.name, copy.mtime_ns, copy.inode, copy.used),
        )

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise StateError(f"state index {self.path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._rows("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:
                self._rows("ROLLBACK")
            raise
        try:
            self._rows("COMMIT")
        except StateError:
            if self._connection.in_transaction:
                self._rows("ROLLBACK")
            raise


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise StateError(
            f"{path}: process {holder} has this node's state store open; ask it over HTTP"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
