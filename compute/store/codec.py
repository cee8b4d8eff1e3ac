"""Records as rows of plain values, and rows as Arrow: what journals keep in memory and on disk.

A row holds a record's values in the order of its schema; arrays of one number per token are packed as bytes
(int32 or float32, as Parquet keeps them), so that a million tokens become a column without a Python object
each. The one boundary where text is made valid Unicode, and where a value that Arrow would refuse later, at
the flush or the seal, is refused at once. Called by the journals.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pyarrow as pa

from megloom.compute.graph.records import KEYS, RECORDS, TABLE_OF, clean_record, record_key
from megloom.compute.graph.schemas import SCHEMAS, from_table

_INT64_MAX = 2**63 - 1
MAX_SIGNATURES = 4096  # remembered per table; a record has as many as its optional fields allow
Row = tuple[Any, ...]
_packer = msgpack.Packer(use_bin_type=True)  # reused: making one costs more than packing; event loop only
_PACKED = {pa.list_(pa.int32()): "i", pa.list_(pa.float32()): "f"}


def _are_texts(value: list[Any]) -> bool:
    return set(map(type, value)) <= {str}


def _are_spans(value: list[Any]) -> bool:
    for span in value:
        for number in span:
            if type(number) is not int or number > _INT64_MAX:
                return False
    return True


_NESTED = {pa.list_(pa.string()): _are_texts, pa.list_(pa.list_(pa.int64())): _are_spans}


class Entry(NamedTuple):
    """A record on its way into a journal. `digest` identifies its content, inside this process only.

    A tuple: one is made at every append, and a frozen dataclass takes three times as long.
    """

    table: str
    key: str
    row: Row
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """How the records of one table are taken apart. `signatures` are the value types seen to be right."""

    table: str
    schema: pa.Schema
    values: Callable[[Any], Row]
    key: int | None  # the place of the key, None if it is made of several columns
    keys: tuple[int, ...]
    integers: tuple[int, ...]
    packed: tuple[tuple[int, str], ...]
    nested: tuple[tuple[int, Callable[[Any], bool]], ...]
    signatures: set[Row]


def _form(table: str) -> _Form:
    schema = SCHEMAS[table]
    types = list(enumerate(schema.types))
    return _Form(
        table=table,
        schema=schema,
        values=attrgetter(*schema.names),
        key=schema.names.index(KEYS[table][0]) if len(KEYS[table]) == 1 else None,
        keys=tuple(schema.names.index(name) for name in KEYS[table]),
        integers=tuple(at for at, kind in types if kind == pa.int64()),
        packed=tuple((at, _PACKED[kind]) for at, kind in types if kind in _PACKED),
        nested=tuple((at, _NESTED[kind]) for at, kind in types if kind in _NESTED),
        signatures=set(),
    )


_FORMS = {record: _form(table) for record, table in TABLE_OF.items()}


def encode(record: Any) -> Entry:
    """Returns the record's table, key, row and digest; lone surrogates in its text become U+FFFD.

    Raises: ValueError, naming the key, if a required field is None, a number does not fit its column, or a
    value is not plain data of its column's type (a numpy scalar, for example).
    """
    form = _FORMS[type(record)]
    try:
        return _entry(form, _row(form, record))
    except UnicodeEncodeError:
        return _entry(form, _row(form, clean_record(record)))
    except (TypeError, OverflowError, struct.error) as error:
        _packer.reset()
        raise ValueError(f"{form.table} {record_key(record)}: cannot be stored: {error}") from error


def to_batch(table: str, rows: Sequence[Row]) -> pa.RecordBatch:
    """The rows of one table as Arrow."""
    form = _FORMS[RECORDS[table]]
    packed = dict(form.packed)
    arrays = [
        _lists(column, field.type) if at in packed else pa.array(column, type=field.type)
        for at, (column, field) in enumerate(zip(zip(*rows, strict=True), form.schema, strict=True))
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=form.schema)


def to_entries(table: str, batch: pa.RecordBatch) -> Iterable[Entry]:
    """The entries that made a batch: what `encode` gave for its records."""
    form = _FORMS[RECORDS[table]]
    packed = dict(form.packed)
    columns = [
        _unpacked(column) if at in packed else column.to_pylist() for at, column in enumerate(batch.columns)
    ]
    return (_entry(form, row) for row in zip(*columns, strict=True))


def to_records(rows: Sequence[tuple[str, Row]]) -> list[Any]:
    """The records of rows of any tables, in their order."""
    by_table: dict[str, list[int]] = {}
    for at, (table, _) in enumerate(rows):
        by_table.setdefault(table, []).append(at)
    records: list[Any] = [None] * len(rows)
    for table, places in by_table.items():
        batch = to_batch(table, [rows[at][1] for at in places])
        for at, record in zip(places, from_table(table, pa.Table.from_batches([batch])), strict=True):
            records[at] = record
    return records


def _row(form: _Form, record: Any) -> Row:
    values = form.values(record)
    if tuple(map(type, values)) not in form.signatures:
        values = _checked(form, record, values)
    for at in form.integers:
        if values[at] is not None and values[at] > _INT64_MAX:
            raise OverflowError(f"{form.schema.names[at]}: integers must be below 2**63, got {values[at]}")
    if form.packed or form.nested:
        row = list(values)
        for at, code in form.packed:
            if row[at] is not None:
                row[at] = struct.pack(f"{len(row[at])}{code}", *row[at])
        for at, is_plain in form.nested:
            if row[at] is not None and not is_plain(row[at]):
                raise TypeError(
                    f"{form.schema.names[at]} must be {form.schema.types[at]}, got {row[at]!r:.80}"
                )
        return tuple(row)
    return values


def _entry(form: _Form, row: Row) -> Entry:
    key = "|".join([str(row[at]) for at in form.keys]) if form.key is None else row[form.key]
    # 64 bits of a keyed hash of bytes. The hash of the row itself would not do: those of -1 and -2 are equal.
    return Entry(form.table, key, row, hash(_packer.pack(row)))


def _checked(form: _Form, record: Any, values: Row) -> Row:
    """The values as plain data of their columns' types."""
    missing = [
        f.name for f, value in zip(form.schema, values, strict=True) if value is None and not f.nullable
    ]
    if missing:
        raise ValueError(f"{form.table} {record_key(record)}: {', '.join(missing)} must not be None")
    plain = tuple(_plain(field, value) for field, value in zip(form.schema, values, strict=True))
    if len(form.signatures) < MAX_SIGNATURES:
        form.signatures.add(tuple(map(type, plain)))
    return plain


def _plain(field: pa.Field, value: Any) -> Any:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if field.type == pa.string() and isinstance(value, str):
        return str.__str__(value)  # an enum's member as its text
    if field.type == pa.float64() and is_number:
        return float(value)
    if field.type == pa.int64() and type(value) is int:
        return value
    if field.type == pa.bool_() and type(value) is bool:
        return value
    if pa.types.is_list(field.type) and isinstance(value, list | tuple):
        return list(value)
    raise TypeError(f"{field.name} must be {field.type}, got {value!r:.80} of {type(value).__name__}")


def _lists(packed: Sequence[bytes | None], kind: pa.DataType) -> pa.ListArray:
    offsets = np.zeros(len(packed) + 1, dtype=np.int32)
    np.cumsum([0 if part is None else len(part) >> 2 for part in packed], out=offsets[1:])
    data = pa.py_buffer(b"".join([part for part in packed if part]))
    values = pa.Array.from_buffers(kind.value_type, int(offsets[-1]), [None, data])
    mask = pa.array([part is None for part in packed]) if None in packed else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind, mask=mask)


def _unpacked(column: pa.ListArray) -> list[bytes | None]:
    """The inverse of `_lists`."""
    offsets = column.offsets.to_pylist()
    data = column.values.to_numpy(zero_copy_only=False).tobytes()
    return [
        data[4 * start : 4 * end] if valid else None
        for start, end, valid in zip(offsets[:-1], offsets[1:], column.is_valid().to_pylist(), strict=True)
    ]
