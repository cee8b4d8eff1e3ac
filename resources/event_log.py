"""Cheaper writes to Dagster's SQLite event log, for the one process that reports a session's steps.

Dagster's SQLite storage makes a new SQLAlchemy engine for every statement and throws it away, and with it the
compiled statements: about 40% of the CPU of an event. Here the engine of a shard is kept while a session is
followed. Postgres, which real use has, keeps its engine anyway; any other storage is left alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import dagster as dg
from dagster._core.storage.event_log import (
    SqliteEventLogStorage,
)  # no public name; dagster is pinned below 1.14
from dagster._core.storage.sql import create_engine
from dagster._core.storage.sqlite import SQLITE_BUSY_TIMEOUT_SECONDS
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import NullPool


@contextmanager
def kept_engines(instance: dg.DagsterInstance) -> Iterator[None]:
    """Until the block ends, the instance's SQLite event log reuses its engines; connections stay short."""
    storage: Any = instance.event_log_storage
    is_sqlite = type(instance.event_log_storage) is SqliteEventLogStorage
    if not is_sqlite or "_connect" in vars(storage):
        yield
        return
    storage._connect = _connector(storage)
    storage.has_table = cache(storage.has_table)
    try:
        yield
    finally:
        del storage._connect, storage.has_table


def _connector(storage: Any) -> Any:
    """What `storage._connect` does, on one engine per shard."""

    @cache
    def engine_of(shard: str) -> Engine:
        with type(storage)._connect(storage, shard):
            pass  # creates the shard's tables on first use
        return create_engine(
            storage.conn_string_for_shard(shard),
            poolclass=NullPool,
            connect_args={"timeout": SQLITE_BUSY_TIMEOUT_SECONDS},
        )

    @contextmanager
    def connect(shard: str) -> Iterator[Connection]:
        engine = engine_of(shard)
        with storage._db_lock, engine.begin() as connection:
            yield connection

    return connect
