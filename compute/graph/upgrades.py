"""Turns a table of the schema version before this one into this one, in Arrow.

What can be derived is derived, from ids and from the table's own rows; the rest is None, or empty text where
a column has no None. Called by readers of sealed steps, file by file.

Version 1 → 2: ids of calls were `<group>-m<member>-a<attempt>-i<index>`, ids of segments began with
`<episode>-a<attempt>-`; only a completion had a parent, its whole prompt; samples listed their path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from megloom.compute.graph.schemas import SCHEMA_VERSION, SCHEMAS, schema_version

_CALL = r"^(?P<group_id>.+)-m(?P<member>\d+)-a(?P<attempt>\d+)-i\d+$"
_SEGMENT = r"^(?P<episode_id>.+-m\d+)-a\d+-"
Columns = dict[str, pa.ChunkedArray]


def upgraded(table: str, arrow: pa.Table) -> pa.Table:
    """The rows in this version's schema; a table of this version comes back as it is.

    Raises: ValueError for a version that this reader does not open, or for rows that no program of the old
    version wrote.
    """
    version = schema_version(arrow)
    if version == SCHEMA_VERSION:
        return arrow
    if version != SCHEMA_VERSION - 1:
        raise ValueError(
            f"table {table}: schema_version {version}, this reader opens {SCHEMA_VERSION - 1} and"
            f" {SCHEMA_VERSION}"
        )
    columns: Columns = {name: arrow.column(name) for name in arrow.column_names}
    columns |= _DERIVED.get(table, lambda _: {})(arrow)
    schema = SCHEMAS[table]
    return pa.Table.from_arrays(
        [columns[f.name] if f.name in columns else _unknown(table, f, arrow.num_rows) for f in schema],
        schema=schema,
    )


def _unknown(table: str, column: pa.Field, num_rows: int) -> pa.Array:
    if column.nullable:
        return pa.nulls(num_rows, column.type)
    if column.type == pa.string():
        return pa.repeat(pa.scalar(""), num_rows)
    raise ValueError(f"table {table}: column {column.name} cannot be derived from schema_version 1")


def _calls(arrow: pa.Table) -> Columns:
    parts = _matched("invocations", arrow.column("invocation_id"), _CALL)
    return {
        "group_id": pc.struct_field(parts, "group_id"),
        "member": pc.cast(pc.struct_field(parts, "member"), pa.int64()),
        "attempt": pc.cast(pc.struct_field(parts, "attempt"), pa.int64()),
        "num_reentries": arrow.column("attempt"),
    }


def _segments(arrow: pa.Table) -> Columns:
    ids, parents = arrow.column("segment_id").combine_chunks(), arrow.column("parent")
    places = pc.index_in(parents, value_set=ids)
    lost = pc.and_(pc.is_valid(parents), pc.is_null(places))
    if pc.any(lost).as_py():
        raise ValueError(f"table segments: parent {parents.filter(lost)[0]} is not among its rows")
    lengths = pc.list_value_length(arrow.column("token_ids"))
    episodes = pc.struct_field(pc.extract_regex(ids, _SEGMENT), "episode_id")
    return {
        # The segments of demonstrations belong to no episode, as in this version.
        "episode_id": pc.fill_null(episodes, ""),
        "start": pc.cast(pc.fill_null(pc.take(lengths, places), 0), pa.int64()),
    }


def _samples(arrow: pa.Table) -> Columns:
    paths = arrow.column("segments").combine_chunks()
    ends = pc.cumulative_sum(pc.list_value_length(paths))
    calls = arrow.column("invocation_id").combine_chunks()
    has_call = pc.cast(pc.is_valid(calls), pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cast(pc.cumulative_sum(has_call), pa.int32())])
    return {
        "leaf_segment": pc.take(pc.list_flatten(paths), pc.subtract(ends, 1)),
        "invocation_ids": pa.ListArray.from_arrays(offsets, calls.drop_null()),
    }


def _matched(table: str, ids: pa.ChunkedArray, pattern: str) -> pa.Array:
    parts = pc.extract_regex(ids.combine_chunks(), pattern)
    if parts.null_count:
        raise ValueError(
            f"table {table}: id {ids.filter(pc.is_null(parts))[0]} is not one of schema_version 1"
        )
    return parts


_DERIVED: Mapping[str, Callable[[pa.Table], Columns]] = {
    "invocations": _calls,
    "segments": _segments,
    "samples": _samples,
}
