"""Datasets: rows with `prompt`, a ground truth, `data_source`, `extra_info`; parquet, read by row group.

A task's id is the hash of its whole row; a repeated row gets an occurrence number. Fields that we do not
know survive: the row is kept as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megloom.compute.graph.records import TaskRecord
from megloom.compute.graph.seeds import content_hash
from megloom.compute.rollout.protocol import WorkloadError
from megloom.compute.workload import Rows

SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("reward_model", pa.struct([pa.field("ground_truth", pa.string())]), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("extra_info", pa.string(), nullable=False),
    ],
    metadata={"schema_version": "1", "extra_info": "json"},
)


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
        if not cache.exists():
            write_rows(source(), cache)
        source = str(cache)
    records: list[tuple[TaskRecord, DatasetTask]] = []
    seen: dict[str, int] = {}
    for position, row in enumerate(_read_rows(source)):
        prompt, truth = _prompt(row, source, position), _ground_truth(row, source, position)
        task_id = content_hash(row)
        seen[task_id] = seen.get(task_id, 0) + 1
        if seen[task_id] > 1:
            task_id = f"{task_id}.{seen[task_id]}"
        record = TaskRecord(
            task_id=task_id,
            split=split,
            position=position,
            prompt=prompt,
            ground_truth=truth,
            data_source=str(row.get("data_source", "")),
            row=json.dumps(row, ensure_ascii=True),
        )
        records.append((record, DatasetTask(task_id=task_id, prompt=prompt, ground_truth=truth, row=row)))
    if not records:
        raise WorkloadError(f"dataset {source}: no rows (expected at least one, split {split})")
    return records


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Writes rows in the field's convention, atomically; nested `extra_info` becomes JSON text."""
    columns: dict[str, list[Any]] = {field.name: [] for field in SCHEMA}
    for position, row in enumerate(rows):
        columns["prompt"].append(_prompt(row, str(path), position))
        columns["reward_model"].append({"ground_truth": _ground_truth(row, str(path), position)})
        columns["data_source"].append(str(row.get("data_source", "")))
        columns["extra_info"].append(json.dumps(row.get("extra_info", {}), sort_keys=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    pq.write_table(pa.table(columns, schema=SCHEMA), draft)
    draft.replace(path)


def _read_rows(source: str) -> Iterator[Mapping[str, Any]]:
    path = Path(source)
    if not path.exists():
        raise WorkloadError(f"dataset {source}: no such file")
    if path.suffix == ".jsonl":
        with path.open() as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, source, number)
        return
    if path.suffix != ".parquet":
        raise WorkloadError(
            f"dataset {source}: expected .parquet or .jsonl, got {path.suffix or 'no suffix'}"
        )
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            for row in file.read_row_group(group).to_pylist():
                if isinstance(row.get("extra_info"), str):
                    row["extra_info"] = _maybe_json(row["extra_info"])
                yield row


def _parse_line(line: str, source: str, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"dataset {source} line {number}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise WorkloadError(f"dataset {source} line {number}: expected an object, got {type(row).__name__}")
    return row


def _maybe_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _prompt(row: Mapping[str, Any], source: str, position: int) -> str:
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    if not isinstance(prompt, str) or not prompt:
        has = ", ".join(sorted(row))
        raise WorkloadError(f"dataset {source} row {position}: missing or empty field 'prompt' (has: {has})")
    return prompt


def _ground_truth(row: Mapping[str, Any], source: str, position: int) -> str:
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else row.get("answer")
    if truth is None:
        has = ", ".join(sorted(row))
        raise WorkloadError(
            f"dataset {source} row {position}: missing 'reward_model.ground_truth' or 'answer' (has: {has})"
        )
    return str(truth)
