"""The Arrow schema of each record, and the way between records and tables.

Schemas are derived from the records' annotations; each names its record and its `schema_version`. Readers of
this version open files of the version before (`upgrades.py`).
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

import pyarrow as pa

from megloom.compute.graph.records import RECORDS

SCHEMA_VERSION = 2

_STR, _INT, _REAL = pa.string(), pa.int64(), pa.float64()
_COLUMNS: dict[str, pa.DataType] = {
    # Columns that are not plain text, integer or float64; every other type is derived from the annotation.
    "token_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "values": pa.list_(pa.float32()),
    "version_spans": pa.list_(pa.list_(_INT)),
    "sample_ids": pa.list_(_STR),
    "invocation_ids": pa.list_(_STR),
}
_SCALARS: dict[str, pa.DataType] = {"str": _STR, "int": _INT, "float": _REAL, "bool": pa.bool_()}


def _schema(record: type) -> pa.Schema:
    columns = []
    for field in fields(record):
        annotation = str(field.type)
        scalar = annotation.removesuffix(" | None")
        kind = _COLUMNS.get(field.name) or _SCALARS[scalar]
        columns.append(pa.field(field.name, kind, nullable=annotation.endswith("| None")))
    return pa.schema(columns, metadata={"schema_version": str(SCHEMA_VERSION), "record": record.__name__})


SCHEMAS: dict[str, pa.Schema] = {table: _schema(record) for table, record in RECORDS.items()}


def schema_version(arrow: pa.Table | pa.Schema) -> int:
    """The version that the table's metadata names."""
    schema = arrow.schema if isinstance(arrow, pa.Table) else arrow
    return int((schema.metadata or {}).get(b"schema_version", b"1"))


def to_table(table: str, records: list[Any]) -> pa.Table:
    """The records of one table as Arrow."""
    schema = SCHEMAS[table]
    rows = map(attrgetter(*schema.names), records)  # one C call per record: sealing runs at every step
    values = list(zip(*rows, strict=True)) or [()] * len(schema)
    columns = [pa.array(column, type=f.type) for column, f in zip(values, schema, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def from_table(table: str, arrow: pa.Table) -> list[Any]:
    """The inverse of `to_table`.

    Raises: ValueError if the stored schema version is newer than this reader.
    """
    version = schema_version(arrow)
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"table {table}: schema_version {version} is newer than this reader ({SCHEMA_VERSION})"
        )
    record = RECORDS[table]
    return [record(**row) for row in arrow.select(SCHEMAS[table].names).to_pylist()]
