"""Reads sealed steps: any number of processes may, while the conductor goes on sealing.

Steps of the schema version before this one are read as this one's (`graph/upgrades.py`). Synchronous; used by
lineage, the CLI and Dagster directly, by the conductor through its `Offload`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from megloom.compute.graph.schemas import SCHEMA_VERSION, SCHEMAS, schema_version
from megloom.compute.graph.upgrades import upgraded
from megloom.compute.store.dropped import read_dropped
from megloom.compute.store.errors import CorruptFile, TokensDropped
from megloom.compute.store.files import Folder, file_digest
from megloom.compute.store.lineage.index_tables import INDEX_SCHEMAS
from megloom.compute.store.manifest import (
    MANIFEST,
    MEG,
    Manifest,
    SealedFile,
    parse_manifest,
    run_folder,
    step_folder,
    step_of,
)


class MegReader:
    """The sealed steps under a root: a local path, an fsspec URL, or a `Folder` on one.

    Missing things raise `FileNotFoundError`, damaged ones `CorruptFile`; both name the file.
    """

    def __init__(self, root: str | Folder) -> None:
        self.folder = Folder(root) if isinstance(root, str) else root

    def runs(self) -> list[str]:
        """The names of all runs, sorted; a run counts before its first seal completes."""
        return self.folder.names(MEG)

    def sealed_steps(self, run: str) -> list[int]:
        """The steps that have a manifest, ascending; empty for an unknown run."""
        found = (step_of(name) for name in self.folder.folders_with(run_folder(run), MANIFEST))
        return sorted(step for step in found if step is not None)

    def last_sealed_step(self, run: str) -> int | None:
        """The newest step that has a manifest, without looking at all the older ones."""
        found = (step_of(name) for name in self.folder.names(run_folder(run)))
        steps = sorted((step for step in found if step is not None), reverse=True)
        return next((step for step in steps if self.is_sealed(run, step)), None)

    def is_sealed(self, run: str, step: int) -> bool:
        return self.folder.exists(f"{step_folder(run, step)}/{MANIFEST}")

    def read_manifest(self, run: str, step: int) -> Manifest:
        path = f"{step_folder(run, step)}/{MANIFEST}"
        manifest = parse_manifest(self.folder.read(path), path)
        if (manifest.run, manifest.step) != (run, step):
            raise CorruptFile(f"{path}: belongs to run {manifest.run} step {manifest.step}")
        return manifest

    def read_table(
        self,
        run: str,
        table: str,
        steps: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        dropped: Literal["raise", "skip"] = "raise",
    ) -> pa.Table:
        """The rows of a table over `steps` (all sealed ones if None), each file checked against its digest.

        Index tables (`index_…`) are read the same way. `dropped` says what to do about rows that retention
        has removed: raise, or go on without them.

        Raises: KeyError for an unknown table; TokensDropped if a file is gone and its step is marked so.
        """
        schema = SCHEMAS[table] if table in SCHEMAS else INDEX_SCHEMAS[table]
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        chosen = self.sealed_steps(run) if steps is None else steps
        if not chosen:
            raise FileNotFoundError(f"{self.folder.root}: run {run} has no sealed step")
        parts = [part for step in chosen for part in self._parts(run, step, table, wanted.names, dropped)]
        return pa.concat_tables([wanted.empty_table(), *parts]) if parts else wanted.empty_table()

    def _parts(
        self, run: str, step: int, table: str, columns: list[str], dropped: Literal["raise", "skip"]
    ) -> Iterator[pa.Table]:
        for file in self.read_manifest(run, step).files:
            if file.table != table:
                continue
            try:
                yield self._read_file(run, step, file, columns)
            except FileNotFoundError as error:
                mark = read_dropped(self.folder, run, step)
                if mark is None or table not in mark.tables:
                    raise
                if dropped == "raise":
                    raise TokensDropped(
                        f"run {run} step {step}: {table} were dropped at {mark.at}: {mark.reason} ({error})"
                    ) from error

    def _read_file(self, run: str, step: int, file: SealedFile, columns: list[str]) -> pa.Table:
        path = f"{step_folder(run, step)}/{file.name}"
        data = self.folder.read(path)
        if (found := file_digest(data)) != file.digest:
            raise CorruptFile(f"{path}: digest {found}, its manifest says {file.digest}")
        parquet = pq.ParquetFile(pa.BufferReader(data))
        if file.table in INDEX_SCHEMAS or schema_version(parquet.schema_arrow) == SCHEMA_VERSION:
            return parquet.read(columns=columns, use_threads=False)
        try:
            return upgraded(file.table, parquet.read(use_threads=False)).select(columns)
        except ValueError as error:
            raise CorruptFile(f"{path}: {error}") from error
