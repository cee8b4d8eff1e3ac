"""Writes exported rows to one local file, jsonl or parquet, row by row; the file appears whole or not at all.

jsonl holds every message as it was. Parquet has one type per column: a message is its role and content, and
what else it held (or a content that is no text) is canonical JSON in `other`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megloom.compute.graph.records import clean_text
from megloom.compute.graph.seeds import canonical_json

Row = Mapping[str, Any]
ROWS_PER_GROUP = 256  # with whole token paths a row may be a megabyte in memory

_STR, _INT = pa.string(), pa.int64()
_MESSAGE = pa.struct([pa.field("role", _STR), pa.field("content", _STR), pa.field("other", _STR)])
_TASK = pa.struct(
    [
        pa.field("prompt", _STR),
        pa.field("reward_model", pa.struct([pa.field("ground_truth", _STR)])),
        pa.field("data_source", _STR),
    ]
)
_COLUMNS: dict[str, pa.DataType] = {
    "messages": pa.list_(_MESSAGE),
    "agent": _STR,
    "policy": _STR,
    "policy_version": _INT,
    "reward": pa.float64(),
    "run": _STR,
    "step": _INT,
    "purpose": _STR,
    "task_id": _STR,
    "group_id": _STR,
    "episode_id": _STR,
    "invocation_id": _STR,
    "finish_reason": _STR,
    "num_prompt_tokens": _INT,
    "num_completion_tokens": _INT,
    "task": _TASK,
}
_TOKEN_COLUMNS: dict[str, pa.DataType] = {
    "token_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "loss_mask": pa.list_(pa.int8()),
}


def write_jsonl(rows: Iterable[Row], path: Path) -> int:
    """Writes a UTF-8 line of JSON per row; returns the file's bytes.

    Raises: ValueError naming the call whose row holds a number that JSON has not (NaN, infinity).
    """
    with _draft(path) as draft, draft.open("wb") as file:
        for row in rows:
            try:
                text = json.dumps(row, ensure_ascii=False, allow_nan=False)
            except ValueError as error:
                raise ValueError(f"call {row['invocation_id']}: {error}") from None
            file.write(clean_text(text).encode() + b"\n")
    return path.stat().st_size


def write_parquet(rows: Iterable[Row], path: Path, *, tokens: bool) -> int:
    """Writes one Parquet file, with the columns of token paths if `tokens`; returns its bytes."""
    schema = pa.schema(_COLUMNS | _TOKEN_COLUMNS if tokens else _COLUMNS)
    flat = ({**row, "messages": [_flat(message) for message in row["messages"]]} for row in rows)
    with _draft(path) as draft, pq.ParquetWriter(draft, schema, compression="zstd") as writer:
        while group := list(islice(flat, ROWS_PER_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    return path.stat().st_size


def _flat(message: Mapping[str, Any]) -> dict[str, str | None]:
    rest = dict(message)
    role, content = rest.pop("role", ""), rest.pop("content", None)
    if content is not None and not isinstance(content, str):
        rest["content"], content = content, None
    return {
        "role": clean_text(str(role)),
        "content": None if content is None else clean_text(content),
        "other": canonical_json(rest) if rest else None,
    }


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place at the end, and is gone after a failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
