"""Datasets: rows with `prompt`, a ground truth, `data_source`, `extra_info`, and whatever else they hold.

A row is kept whole, as canonical JSON; its task's id is the hash of that text, and a repeated row gets an
occurrence number. Sources are jsonl (UTF-8), parquet (read by row group; columns of JSON text are parsed),
or a function, whose rows are built once into a parquet cache. Every error names the file, the place and the
field.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megloom.compute.graph.records import TaskRecord, clean_text
from megloom.compute.graph.seeds import canonical_json, text_hash
from megloom.compute.rollout.protocol import WorkloadError
from megloom.compute.workload import Rows

# The cache of a function's rows: `row` is the truth, the other columns are for readers of the convention.
CACHE = pa.schema(
    [
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("reward_model", pa.struct([pa.field("ground_truth", pa.string())]), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("extra_info", pa.string(), nullable=False),
        pa.field("row", pa.string(), nullable=False),
    ],
    metadata={"schema_version": "2", "record": "megloom task row"},
)
ROWS_PER_GROUP = 1024  # of the cache: a gigabyte where every prompt is a megabyte
# Parquet has one type a column, so the convention keeps what differs from row to row as JSON text in these.
# Columns of Parquet's own JSON type are parsed too.
JSON_TEXT_COLUMNS = frozenset({"reward_model", "extra_info", "tools"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetTask:
    """`megloom.compute.workload.Task`."""

    task_id: str
    prompt: str
    ground_truth: str
    row: Mapping[str, Any]


def load_tasks(source: str | Rows, *, split: str, cache: Path) -> list[tuple[TaskRecord, DatasetTask]]:
    """Reads a dataset; a function's rows are built once and kept in `cache` (a parquet path).

    Raises: WorkloadError naming the source, the row and the field, or an empty dataset.
    """
    if not isinstance(source, str):
        if not _is_cache(cache):
            write_rows(source(), cache)
        source = str(cache)
    pairs: list[tuple[TaskRecord, DatasetTask]] = []
    seen: dict[str, int] = {}
    for position, (place, row) in enumerate(_read_rows(source)):
        prompt, truth = _prompt(row, place), _ground_truth(row, place)
        text = _row_json(row, place)
        task_id = text_hash(text)
        seen[task_id] = seen.get(task_id, 0) + 1
        if seen[task_id] > 1:
            task_id = f"{task_id}.{seen[task_id]}"
        record = TaskRecord(
            task_id=task_id,
            split=split,
            position=position,
            prompt=clean_text(prompt),  # the wire and Arrow take valid Unicode only; `row` has it all
            ground_truth=clean_text(truth),
            data_source=_data_source(row),
            row=text,
        )
        pairs.append((record, DatasetTask(task_id=task_id, prompt=prompt, ground_truth=truth, row=row)))
    if not pairs:
        raise WorkloadError(f"dataset {source}: no rows (expected at least one, split {split})")
    return pairs


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Writes a function's rows whole, as the cache that `load_tasks` reads. All or nothing.

    Raises: WorkloadError naming the row and the field that is missing or is no JSON.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # two workers may build the same rows at once
    try:
        with pq.ParquetWriter(draft, CACHE, compression="zstd") as writer:
            cells = (_cells(row, f"dataset {path} row {position}") for position, row in enumerate(rows))
            while group := list(islice(cells, ROWS_PER_GROUP)):
                writer.write_table(pa.Table.from_pylist(group, schema=CACHE))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _cells(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise WorkloadError(f"{place}: expected a mapping, got {type(row).__name__}")
    prompt, truth, text = _prompt(row, place), _ground_truth(row, place), _row_json(row, place)
    return {
        "prompt": clean_text(prompt),
        "reward_model": {"ground_truth": clean_text(truth)},
        "data_source": _data_source(row),
        "extra_info": canonical_json(row.get("extra_info", {})),
        "row": text,
    }


def _is_cache(path: Path) -> bool:
    """Whether `path` is there and holds whole rows: caches of older versions are built anew."""
    return path.exists() and _keeps_rows(pq.read_schema(path))


def _keeps_rows(schema: pa.Schema) -> bool:
    return (schema.metadata or {}).items() >= CACHE.metadata.items()


def _read_rows(source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows, each with its place in words."""
    path = Path(source)
    if not path.exists():
        raise WorkloadError(f"dataset {source}: no such file")
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise WorkloadError(f"dataset {source}: expected .parquet or .jsonl, got {path.suffix or 'no suffix'}")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    position = 0
    with path.open("rb") as lines:  # bytes: a locale has no say in what a line means
        for number, line in enumerate(lines, start=1):
            place = f"dataset {path} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise WorkloadError(
                    f"{place}: not UTF-8 ({error.reason} at byte {error.start} of the line)"
                ) from None
            if text.strip():
                yield f"{place}, row {position}", _parse_line(text, place)
                position += 1


def _parse_line(text: str, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise WorkloadError(f"{place}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise WorkloadError(f"{place}: expected an object, got {type(row).__name__}")
    return row


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise WorkloadError(f"dataset {path}: not a parquet file ({error})") from None
    with file:
        schema = file.schema_arrow
        json_typed = {f.name for f in schema if isinstance(f.type, pa.JsonType)}
        columns = ["row"] if _keeps_rows(schema) else schema.names
        position = 0
        for group in range(file.num_row_groups):
            for row in file.read_row_group(group, columns=columns).to_pylist():
                place = f"dataset {path} row {position}"
                yield (
                    place,
                    _parse_line(row["row"], place)
                    if columns == ["row"]
                    else _parse_cells(row, json_typed, place),
                )
                position += 1


def _parse_cells(row: dict[str, Any], json_typed: set[str], place: str) -> Mapping[str, Any]:
    """The row with its JSON text parsed. In a column that is JSON only by its name, other text stays text."""
    for name in (JSON_TEXT_COLUMNS | json_typed) & row.keys():
        if isinstance(row[name], str):
            try:
                row[name] = json.loads(row[name])
            except (ValueError, RecursionError) as error:
                if name in json_typed:
                    raise WorkloadError(f"{place} field {name!r}: not JSON ({error})") from None
    return row


def _row_json(row: Mapping[str, Any], place: str) -> str:
    try:
        return canonical_json(dict(row))
    except (TypeError, ValueError, RecursionError):
        for name, value in row.items():
            try:
                canonical_json({name: value})
            except (TypeError, ValueError, RecursionError) as error:
                raise WorkloadError(f"{place} field {name!r}: cannot be kept as JSON ({error})") from None
        raise WorkloadError(f"{place}: expected text as field names, got {list(row)}") from None


def _prompt(row: Mapping[str, Any], place: str) -> str:
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    if not isinstance(prompt, str) or not prompt:
        raise WorkloadError(f"{place}: missing or empty field 'prompt' (has: {_fields(row)})")
    return prompt


def _ground_truth(row: Mapping[str, Any], place: str) -> str:
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    if truth is None:
        truth = row.get("answer")
    if truth is None:
        raise WorkloadError(f"{place}: missing 'reward_model.ground_truth' or 'answer' (has: {_fields(row)})")
    return str(truth)


def _data_source(row: Mapping[str, Any]) -> str:
    name = row.get("data_source")
    return "" if name is None else clean_text(str(name))


def _fields(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row)))
