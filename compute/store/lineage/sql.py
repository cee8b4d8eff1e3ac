"""Any SQL over a run: DuckDB views that read the sealed Parquet files only when a query needs them.

Views: every table of the records, `invocations_<agent>` and the like for tables that are cut by agent, and
the index as `versions`, `version_edges`, `task_uses` and `reward_uses`. A query is one SELECT and reaches
nothing outside the store. The CLI, notebooks and users' scripts call it. Synchronous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from megloom.compute.graph.schemas import SCHEMA_VERSION, SCHEMAS
from megloom.compute.store.dropped import DROPPED
from megloom.compute.store.errors import CorruptFile
from megloom.compute.store.files import file_digest
from megloom.compute.store.lineage.index_tables import FILES, INDEX_SCHEMAS
from megloom.compute.store.lineage.run_index import RunIndex
from megloom.compute.store.manifest import run_folder, step_folder

INDEX_VIEWS = {
    "versions": "index_versions",
    "version_edges": "index_edges",
    "task_uses": "index_uses",
    "reward_uses": "index_rewards",
}
_BATCH = 10_000  # rows that a result is fetched in, so that a long one is counted without being held


class BadQuery(ValueError):
    """A query that DuckDB refuses, with its message in one line and the names of the views."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryResult:
    """`rows` are the first of `num_rows`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Source:
    """The files of one view, in their order, and rows that no file holds."""

    table: str
    schema: pa.Schema
    current: list[str]
    old: list[str]
    derived: pa.Table | None = None


def views(con: duckdb.DuckDBPyConnection, root: str, run: str, *, verify: bool = False) -> list[str]:
    """Creates the views of a run in any connection, and returns their names.

    Each file's size is compared with its manifest, with `verify` also its digest. Files stay on disk until a
    query needs them.

    Raises: FileNotFoundError if the run has no sealed step or lacks a file; CorruptFile for a damaged file.
    """
    index = RunIndex(root, run)
    gone = _check_files(index, verify)
    fs, _ = fsspec.core.url_to_fs(root)
    if not _is_local(fs):
        con.register_filesystem(fs)
    return _create_views(con, index, gone)


def query(root: str, run: str, sql: str, *, max_rows: int | None = None, verify: bool = False) -> QueryResult:
    """The result of one SELECT; its first `max_rows` rows, all if None.

    Raises: BadQuery; and what `views` raises.
    """
    with duckdb.connect(":memory:") as con:
        names = views(con, root, run, verify=verify)
        con.execute(f"set allowed_directories = [{_literal(_location(root))}]")
        con.execute("set enable_external_access = false")
        con.execute("set lock_configuration = true")
        try:
            # The store's folder stays writable to DuckDB: COPY and ATTACH must not reach it.
            kinds = [statement.type for statement in con.extract_statements(sql)]
            if kinds != [duckdb.StatementType.SELECT]:
                raise BadQuery(f"expected one SELECT, got {', '.join(map(_kind, kinds)) or 'nothing'}")
            return _fetch(con.sql(sql), max_rows)
        except duckdb.Error as error:
            message = " ".join(str(error).split("\n\n")[0].split())
            raise BadQuery(f"{message}\nviews: {', '.join(names)}") from None


def write_views(root: str, run: str, path: Path, *, verify: bool = False) -> list[str]:
    """Writes a database file with the views, for any DuckDB client; returns their names.

    It refers to the store's files by their place. Steps that are sealed later are not in it.

    Raises: FileExistsError if there is a file at `path`.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists: give a new path for the views")
    RunIndex(root, run)  # raises before there is a file
    with duckdb.connect(str(path)) as con:
        return views(con, root, run, verify=verify)


def _fetch(relation: duckdb.DuckDBPyRelation, max_rows: int | None) -> QueryResult:
    rows: list[tuple[Any, ...]] = []
    num_rows = 0
    for batch in relation.to_arrow_reader(_BATCH):
        num_rows += batch.num_rows
        room = batch.num_rows if max_rows is None else max_rows - len(rows)
        if room > 0:
            rows += zip(*(column.to_pylist() for column in batch.slice(0, room).columns), strict=True)
    return QueryResult(columns=tuple(relation.columns), rows=tuple(rows), num_rows=num_rows)


def _kind(kind: Any) -> str:
    return str(kind.name)


def _create_views(con: duckdb.DuckDBPyConnection, index: RunIndex, gone: set[str]) -> list[str]:
    sources = _table_sources(index, gone) | _index_sources(index)
    for name, source in sources.items():
        con.execute(f"create or replace view {_quoted(name)} as {_select(con, name, source)}")
    return list(sources)


def _table_sources(index: RunIndex, gone: set[str]) -> dict[str, _Source]:
    sources = {table: _Source(table, schema, [], []) for table, schema in SCHEMAS.items()}
    by_agent: dict[str, _Source] = {}
    root = _location(index.root).rstrip("/")
    files = index.table(FILES).sort_by([("step", "ascending"), ("name", "ascending")])
    for file in files.to_pylist():
        table, agent, place = file["table"], file["agent"], _place(index, file)
        if table not in SCHEMAS or place in gone:
            continue
        path = f"{root}/{place}"
        wanted = [sources[table]]
        if agent is not None:
            wanted.append(by_agent.setdefault(f"{table}_{agent}", _Source(table, SCHEMAS[table], [], [])))
        for source in wanted:
            (source.current if file["schema_version"] == SCHEMA_VERSION else source.old).append(path)
    return sources | dict(sorted(by_agent.items()))


def _index_sources(index: RunIndex) -> dict[str, _Source]:
    sources, root = {}, _location(index.root).rstrip("/")
    for view, table in INDEX_VIEWS.items():
        files, derived = index.index_files(table)
        paths = [f"{root}/{path}" for path in files]
        sources[view] = _Source(table, INDEX_SCHEMAS[table], paths, [], derived)
    return sources


def _select(con: duckdb.DuckDBPyConnection, name: str, source: _Source) -> str:
    """SQL that gives the view's columns from all of its sources."""
    columns = ", ".join(_quoted(column) for column in source.schema.names)
    nothing = ", ".join(f"null::{_sql_type(f.type)} as {_quoted(f.name)}" for f in source.schema)
    parts = [f"select {nothing} where false"]
    if source.current:
        parts.append(f"select {columns} from {_scan(source.current, source.schema)}")
    if source.old:
        parts.append(f"select {_old_columns(con, source)} from {_scan(source.old, source.schema)}")
    if source.derived is not None:
        table = f"derived_{name}"
        con.register("arriving", source.derived)
        con.execute(f"create or replace table {_quoted(table)} as select * from arriving")
        con.unregister("arriving")
        parts.append(f"select {columns} from {_quoted(table)}")
    return " union all ".join(parts)


def _scan(paths: Sequence[str], schema: pa.Schema) -> str:
    """A condition on `step` then skips the files of other steps: their folders name it."""
    listed = ", ".join(map(_literal, paths))
    is_cut = "step" in schema.names and all("/step=" in path for path in paths)
    hive = (
        "hive_partitioning = true, hive_types = {'step': BIGINT}" if is_cut else "hive_partitioning = false"
    )
    return f"read_parquet([{listed}], {hive})"


def _old_columns(con: duckdb.DuckDBPyConnection, source: _Source) -> str:
    """The columns of files of schema 1, as `graph/upgrades.py` derives them; null where SQL cannot."""
    first = f"select * from {_scan(source.old[:1], source.schema)} limit 0"
    there = {column[0]: _quoted(column[0]) for column in con.execute(first).description}
    known = there | _OLD_COLUMNS.get(source.table, {})
    return ", ".join(
        f"({known.get(f.name, 'null')})::{_sql_type(f.type)} as {_quoted(f.name)}" for f in source.schema
    )


# Ids of schema 1 tell what its rows did not.
_OLD_COLUMNS: dict[str, dict[str, str]] = {
    "invocations": {
        "group_id": "regexp_extract(invocation_id, '^(.+)-m[0-9]+-a[0-9]+-i[0-9]+$', 1)",
        "member": "regexp_extract(invocation_id, '-m([0-9]+)-a[0-9]+-i[0-9]+$', 1)",
        "attempt": "regexp_extract(invocation_id, '-a([0-9]+)-i[0-9]+$', 1)",
        "num_reentries": "attempt",
    },
    "samples": {"leaf_segment": "segments[-1]"},
    "segments": {"episode_id": "regexp_extract(segment_id, '^(.+-m[0-9]+)-a[0-9]+-', 1)"},
}


def _check_files(index: RunIndex, verify: bool) -> set[str]:
    """The files that retention removed.

    Raises: FileNotFoundError or CorruptFile, naming the first file that is not as its manifest says.
    """
    fs, base = fsspec.core.url_to_fs(index.root)
    found = fs.find(f"{base.rstrip('/')}/{run_folder(index.run)}", detail=True)
    sizes = {path.removeprefix(base.rstrip("/") + "/"): info["size"] for path, info in found.items()}
    gone = set()
    for path, size_bytes, digest in _expected(index):
        if path not in sizes:
            if f"{path.rpartition('/')[0]}/{DROPPED}" not in sizes:
                raise FileNotFoundError(f"{index.root}: no file {path}")
            gone.add(path)
        elif sizes[path] != size_bytes:
            raise CorruptFile(f"{path}: {sizes[path]} bytes, its manifest says {size_bytes}")
        elif verify and (actual := file_digest(index.folder.read(path))) != digest:
            raise CorruptFile(f"{path}: digest {actual}, its manifest says {digest}")
    return gone


def _expected(index: RunIndex) -> Iterator[tuple[str, int, str]]:
    """Path, size and digest of every file behind the views."""
    for file in index.table(FILES).to_pylist():
        yield _place(index, file), file["size_bytes"], file["digest"]
    for table in INDEX_VIEWS.values():
        for path, sealed in index.index_files(table)[0].items():
            yield path, sealed.size_bytes, sealed.digest


def _place(index: RunIndex, file: Mapping[str, Any]) -> str:
    return f"{step_folder(index.run, file['step'])}/{file['name']}"


def _is_local(fs: Any) -> bool:
    return isinstance(fs, LocalFileSystem)


def _location(url: str) -> str:
    """What DuckDB opens: an absolute path, or a URL of the file system that it was given."""
    fs, path = fsspec.core.url_to_fs(url)
    return str(path) if _is_local(fs) else str(fs.unstrip_protocol(path))


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type)}[]"
    return _SQL_TYPES[kind]


_SQL_TYPES = {
    pa.string(): "varchar",
    pa.int64(): "bigint",
    pa.int32(): "integer",
    pa.float64(): "double",
    pa.float32(): "float",
    pa.bool_(): "boolean",
}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
