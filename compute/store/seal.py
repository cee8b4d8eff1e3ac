"""Writes one step as Parquet files and a manifest. Synchronous: `MegStore` runs it on its offload.

Killed anywhere before the manifest appears, the step is unsealed and the next seal overwrites the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megloom.compute.graph.records import TABLE_OF
from megloom.compute.graph.schemas import to_table
from megloom.compute.store.files import Folder, file_digest
from megloom.compute.store.manifest import (
    MANIFEST,
    Manifest,
    SealedFile,
    manifest_bytes,
    path_name,
    step_folder,
)

BY_AGENT = frozenset({"invocations", "samples"})  # one file per agent: what an agent's trainer reads
# Columns of few distinct values: a dictionary for every column doubles the time to write a step.
REPEATED = frozenset(
    {"run", "step", "agent", "policy", "state", "kind", "cell", "task_id", "group_id", "episode_id"}
)


def write_step(
    folder: Folder,
    run: str,
    step: int,
    records: Iterable[Any],
    previous_step: int | None,
    snapshot: Mapping[str, Any],
) -> Manifest:
    """Writes the step's files, then publishes its manifest, which it returns.

    Raises: FileExistsError if the step has a manifest already.
    """
    parts = _parts(records)
    draft = Manifest(run=run, step=step, previous_step=previous_step, files=(), snapshot=snapshot)
    manifest_bytes(draft)  # an unfit snapshot is refused before the first write
    files = tuple(
        _write_part(folder, step_folder(run, step), table, agent, part)
        for (table, agent), part in sorted(parts.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    )
    manifest = Manifest(run=run, step=step, previous_step=previous_step, files=files, snapshot=snapshot)
    folder.publish(f"{step_folder(run, step)}/{MANIFEST}", manifest_bytes(manifest))
    return manifest


def _parts(records: Iterable[Any]) -> dict[tuple[str, str | None], list[Any]]:
    parts: dict[tuple[str, str | None], list[Any]] = defaultdict(list)
    for record in records:
        table = TABLE_OF[type(record)]
        parts[table, path_name("agent", record.agent) if table in BY_AGENT else None].append(record)
    return parts


def _write_part(folder: Folder, where: str, table: str, agent: str | None, records: list[Any]) -> SealedFile:
    name = f"{table}.parquet" if agent is None else f"{table}-{agent}.parquet"
    data = parquet_bytes(to_table(table, records))
    folder.write(f"{where}/{name}", data)
    return SealedFile(
        name=name,
        table=table,
        agent=agent,
        num_rows=len(records),
        size_bytes=len(data),
        digest=file_digest(data),
    )


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as one Parquet file. Readers take whole files, so page statistics are not written."""
    repeated = [name for name in table.column_names if name in REPEATED]
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=repeated, write_statistics=False)
    return bytes(sink.getvalue())
