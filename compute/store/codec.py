"""Records as journal bodies: msgpack of a record's field values, in the order of its schema.

Called by the journals. The one boundary where text is made valid Unicode, and where a value that Parquet
would refuse much later, at the seal, is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import msgpack

from megloom.compute.graph.records import RECORDS, TABLE_OF, clean_record, record_key
from megloom.compute.graph.schemas import SCHEMAS

_INT64_MAX = 2**63 - 1
_packer = msgpack.Packer(use_bin_type=True)  # reused: making one costs more than packing; event loop only


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A record on its way into a journal. `digest` is 16 bytes of blake2b over `body`."""

    table: str
    key: str
    body: bytes
    digest: bytes


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Like `attrgetter`, and always gives a tuple."""
    if len(names) == 1:
        single = attrgetter(names[0])
        return lambda record: (single(record),)
    return attrgetter(*names)


_VALUES = {table: _getter(schema.names) for table, schema in SCHEMAS.items()}
_REQUIRED = {table: _getter([c.name for c in schema if not c.nullable]) for table, schema in SCHEMAS.items()}
_INTEGERS = {
    table: _getter([c.name for c in schema if str(c.type) == "int64" and not c.nullable])
    for table, schema in SCHEMAS.items()
    if any(str(c.type) == "int64" and not c.nullable for c in schema)
}


def encode(record: Any) -> Entry:
    """Returns the record's table, key and body; lone surrogates in its text become U+FFFD.

    Raises: ValueError, naming the key, if a required field is None, an integer does not fit into 64 bits, or
    a value is not plain data (a numpy scalar, for example).
    """
    table = TABLE_OF[type(record)]
    try:
        body = _pack(table, record)
    except UnicodeEncodeError:
        record = clean_record(record)
        body = _pack(table, record)
    return Entry(table=table, key=record_key(record), body=body, digest=content_digest(body))


def decode(table: str, body: bytes) -> Any:
    """The inverse of `encode`."""
    return RECORDS[table](**dict(zip(SCHEMAS[table].names, msgpack.unpackb(body), strict=True)))


def content_digest(body: bytes) -> bytes:
    """16 bytes that identify a body, so that the journal keeps no second copy of it in memory."""
    return blake2b(body, digest_size=16).digest()


def _pack(table: str, record: Any) -> bytes:
    if None in _REQUIRED[table](record):
        missing = [c.name for c in SCHEMAS[table] if not c.nullable and getattr(record, c.name) is None]
        raise ValueError(f"{table} {record_key(record)}: {', '.join(missing)} must not be None")
    try:
        if table in _INTEGERS and max(integers := _INTEGERS[table](record)) > _INT64_MAX:
            raise OverflowError(f"integers must be below 2**63, got {integers}")
        return _packer.pack(_VALUES[table](record))
    except (TypeError, OverflowError) as error:
        _packer.reset()
        raise ValueError(f"{table} {record_key(record)}: cannot be stored: {error}") from error
