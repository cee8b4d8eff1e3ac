"""Reads sealed steps: any number of processes may, while the conductor goes on sealing.

Synchronous; used by lineage, the CLI and Dagster directly, by the conductor through its `Offload`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from megloom.compute.graph.schemas import SCHEMAS
from megloom.compute.store.errors import CorruptFile
from megloom.compute.store.files import Folder, file_digest
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
    """The sealed steps under a root: a local path or an fsspec URL.

    Missing things raise `FileNotFoundError`, damaged ones `CorruptFile`; both name the file.
    """

    def __init__(self, root: str) -> None:
        self._folder = Folder(root)

    def runs(self) -> list[str]:
        """The names of all runs, sorted; a run counts before its first seal completes."""
        return self._folder.names(MEG)

    def sealed_steps(self, run: str) -> list[int]:
        """The steps that have a manifest, ascending; empty for an unknown run."""
        found = (step_of(name) for name in self._folder.names(run_folder(run)))
        return [s for s in sorted(f for f in found if f is not None) if self._is_sealed(run, s)]

    def read_manifest(self, run: str, step: int) -> Manifest:
        path = f"{step_folder(run, step)}/{MANIFEST}"
        manifest = parse_manifest(self._folder.read(path), path)
        if (manifest.run, manifest.step) != (run, step):
            raise CorruptFile(f"{path}: belongs to run {manifest.run} step {manifest.step}")
        return manifest

    def read_table(
        self,
        run: str,
        table: str,
        steps: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """The rows of a table over `steps` (all sealed ones if None), each file checked against its digest.

        Raises: KeyError for an unknown table.
        """
        schema = SCHEMAS[table]
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        chosen = self.sealed_steps(run) if steps is None else steps
        if not chosen:
            raise FileNotFoundError(f"{self._folder.root}: run {run} has no sealed step")
        parts = [
            self._read_file(run, step, file, wanted.names)
            for step in chosen
            for file in self.read_manifest(run, step).files
            if file.table == table
        ]
        return pa.concat_tables([wanted.empty_table(), *parts]) if parts else wanted.empty_table()

    def _read_file(self, run: str, step: int, file: SealedFile, columns: list[str]) -> pa.Table:
        path = f"{step_folder(run, step)}/{file.name}"
        data = self._folder.read(path)
        if (found := file_digest(data)) != file.digest:
            raise CorruptFile(f"{path}: digest {found}, its manifest says {file.digest}")
        return pq.read_table(pa.BufferReader(data), columns=columns, use_threads=False)

    def _is_sealed(self, run: str, step: int) -> bool:
        return self._folder.exists(f"{step_folder(run, step)}/{MANIFEST}")
