"""Writes one step as Parquet files and a manifest. Synchronous: `MegStore` runs it on its offload.

Rows stream from the journal's frames into the files, so that a step needs the memory of a row group, not of
its own size. Files are named by their content, so two writers never overwrite each other's. Killed anywhere
before the manifest appears, the step is unsealed, and the next writer of the run removes what was written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megloom.compute.graph.records import TABLE_OF
from megloom.compute.graph.schemas import SCHEMAS, to_table
from megloom.compute.store.draft import Draft
from megloom.compute.store.errors import StoreError
from megloom.compute.store.files import Folder, file_digest
from megloom.compute.store.lineage.blocks import index_bytes
from megloom.compute.store.lineage.index_tables import INDEX_SOURCES, step_index
from megloom.compute.store.manifest import (
    MANIFEST,
    Manifest,
    SealedFile,
    manifest_bytes,
    path_name,
    step_folder,
)

Rows = Iterable[pa.RecordBatch]
BY_AGENT = frozenset({"invocations", "samples", "fields"})  # one file per agent: what its trainer reads
# Columns of few distinct values: a dictionary for every column doubles the time to write a step.
REPEATED = frozenset(
    {
        "agent", "cell", "engine", "episode_id", "finish_reason", "group_id", "kind", "name", "policy",
        "reward_status", "role", "run", "source", "state", "step", "task_id",
    }
)  # fmt: skip
ROW_GROUP = 8192  # rows: 20 MB of tokens; what a seal holds in memory at a time
DIGEST_LETTERS = 12  # of a file's digest in its name; the manifest holds the whole digest


def write_step(
    folder: Folder,
    run: str,
    step: int,
    records: Iterable[Any],
    previous_step: int | None,
    snapshot: Mapping[str, Any],
) -> Manifest:
    """`write_rows` from records."""
    by_table: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        by_table[TABLE_OF[type(record)]].append(record)
        path_name("agent", getattr(record, "agent", "none"))
    rows = {table: to_table(table, part).to_batches() for table, part in by_table.items()}
    return write_rows(folder, run, step, rows, previous_step, snapshot)


def write_rows(
    folder: Folder,
    run: str,
    step: int,
    rows: Mapping[str, Rows],
    previous_step: int | None,
    snapshot: Mapping[str, Any],
    before_publish: Callable[[], None] = lambda: None,
) -> Manifest:
    """Writes the step's files and those of its index, then publishes its manifest, which it returns.

    `before_publish` may refuse by raising: the step stays unsealed then.

    Raises: FileExistsError if the step has a manifest already; StoreError if a row belongs to another run.
    """
    draft = Manifest(run=run, step=step, previous_step=previous_step, files=(), snapshot=snapshot)
    manifest_bytes(draft)  # an unfit snapshot is refused before the first write
    where = step_folder(run, step)
    files: list[SealedFile] = []
    sources: dict[str, pa.Table] = {}
    for table, batches in sorted(rows.items()):
        kept: list[pa.RecordBatch] = []
        files += _write_table(
            folder, where, table, _of_run(run, step, batches, kept, INDEX_SOURCES.get(table))
        )
        if kept:
            sources[table] = pa.Table.from_batches(kept)
    files += _write_index(folder, where, sources)
    manifest = Manifest(
        run=run, step=step, previous_step=previous_step, files=tuple(files), snapshot=snapshot
    )
    before_publish()
    folder.publish(f"{where}/{MANIFEST}", manifest_bytes(manifest))
    return manifest


def _of_run(
    run: str, step: int, batches: Rows, kept: list[pa.RecordBatch], index_columns: tuple[str, ...] | None
) -> Iterator[pa.RecordBatch]:
    """The batches, checked to belong to the run; what the index needs of them is put into `kept`."""
    for batch in batches:
        if "run" in batch.schema.names:
            foreign = set(batch.column("run").unique().to_pylist()) - {run}
            if foreign:
                raise StoreError(f"run {run}: step {step} holds records of run {', '.join(sorted(foreign))}")
        if index_columns is not None:
            kept.append(batch.select(index_columns))
        yield batch


def _write_table(folder: Folder, where: str, table: str, batches: Rows) -> list[SealedFile]:
    """The table's files: one, or one per agent."""
    files: dict[str | None, _File] = {}
    with ExitStack() as drafts:
        for batch in batches:
            for agent, part in _by_agent(batch) if table in BY_AGENT else [(None, batch)]:
                if agent not in files:
                    draft = drafts.enter_context(folder.draft(where))
                    files[agent] = _File(folder, where, table, agent, draft)
                files[agent].add(part)
        return [files[agent].finished() for agent in sorted(files, key=lambda agent: agent or "")]


def _by_agent(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    agents = batch.column("agent")
    found = agents.unique().to_pylist()
    for agent in found:
        own = batch if len(found) == 1 else batch.filter(pc.equal(agents, agent))
        yield path_name("agent", agent), own


class _File:
    """One Parquet file in the making. Equal rows give equal bytes, however the journal had cut them."""

    def __init__(self, folder: Folder, where: str, table: str, agent: str | None, draft: Draft) -> None:
        self._folder, self._where = folder, where
        self._table, self._agent, self._draft = table, agent, draft
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = self._num_rows = 0
        schema = SCHEMAS[table]
        self._parquet = pq.ParquetWriter(draft, schema, **parquet_options(schema))

    def add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._num_waiting += batch.num_rows
        while self._num_waiting >= ROW_GROUP:
            self._write(ROW_GROUP)

    def finished(self) -> SealedFile:
        """Puts the file in its place."""
        if self._num_waiting:
            self._write(self._num_waiting)
        self._parquet.close()
        digest = self._draft.digest()
        name = file_name(self._table, self._agent, digest)
        self._folder.keep(self._draft, f"{self._where}/{name}")
        return SealedFile(
            name=name,
            table=self._table,
            agent=self._agent,
            num_rows=self._num_rows,
            size_bytes=self._draft.size_bytes,
            digest=digest,
        )

    def _write(self, num_rows: int) -> None:
        waiting = pa.Table.from_batches(self._waiting)
        self._parquet.write_table(waiting.slice(0, num_rows), row_group_size=num_rows)
        self._waiting = waiting.slice(num_rows).to_batches()
        self._num_rows += num_rows
        self._num_waiting -= num_rows


def _write_index(folder: Folder, where: str, sources: Mapping[str, pa.Table]) -> Iterator[SealedFile]:
    if "policy_versions" not in sources:
        return  # all that the index holds hangs on the step's versions
    for table, rows in sorted(step_index(sources).items()):
        data = index_bytes(rows)
        digest = file_digest(data)
        name = file_name(table, None, digest)
        folder.write(f"{where}/{name}", data)
        yield SealedFile(
            name=name, table=table, agent=None, num_rows=rows.num_rows, size_bytes=len(data), digest=digest
        )


def file_name(table: str, agent: str | None, digest: str) -> str:
    """The name of a table's file in its step's folder."""
    cut = table if agent is None else f"{table}-{agent}"
    return f"{cut}-{digest[:DIGEST_LETTERS]}.parquet"


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """How sealed tables are written. Readers take whole files, so page statistics are not."""
    repeated = [name for name in schema.names if name in REPEATED]
    return {"compression": "zstd", "use_dictionary": repeated, "write_statistics": False}
