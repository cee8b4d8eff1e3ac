"""The parts that a run's index consists of: a step with its own index tables, or a block of many steps.

Each reads a table when it is asked for it, and checks the file's digest.
"""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megloom.compute.store.errors import CorruptFile
from megloom.compute.store.files import Folder, file_digest
from megloom.compute.store.lineage.blocks import Block, Window, block_path, index_folder, parse_block
from megloom.compute.store.lineage.index_tables import (
    BLOCK_SCHEMAS,
    FILES,
    INDEX_SCHEMAS,
    INDEX_SOURCES,
    files_table,
    step_index,
)
from megloom.compute.store.manifest import MANIFEST, Manifest, SealedFile, parse_manifest, step_folder
from megloom.compute.store.reader import MegReader

RARE_TABLES = ("tasks", "provenance")  # tables that few steps have: their steps stand in a block's manifest


class Part(Protocol):
    """A stretch of steps, ascending; `num_files` counts the files of these steps, with their manifests."""

    steps: tuple[int, ...]
    num_files: int

    def steps_with(self, table: str) -> list[int]:
        """The steps that have a file of one of `RARE_TABLES`."""
        ...

    def table(self, name: str, key: str | None = None) -> pa.Table:
        """Its rows of an index table, or those with `key` in the leading column.

        Raises: CorruptFile for a damaged file.
        """
        ...

    def files(self, name: str) -> dict[str, SealedFile] | None:
        """The files of an index table by their paths; None if the table must be derived."""
        ...


class StepPart:
    """One sealed step. A step of schema 1 has no index files: its index is derived from its tables."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.steps: tuple[int, ...] = (manifest.step,)
        self.num_files = len(manifest.files) + 1
        self.manifest = manifest
        self._folder = folder
        self._derived: dict[str, pa.Table] | None = None

    def steps_with(self, table: str) -> list[int]:
        return list(self.steps) if any(file.table == table for file in self.manifest.files) else []

    def table(self, name: str, key: str | None = None) -> pa.Table:
        if name == FILES:
            return _only(files_table(self.manifest), key)
        files = self.files(name)
        if files is None:
            return _only(self._derive()[name], key)
        parts = [read_index(self._folder, path, file, key) for path, file in files.items()]
        return pa.concat_tables([INDEX_SCHEMAS[name].empty_table(), *parts])

    def files(self, name: str) -> dict[str, SealedFile] | None:
        own = [file for file in self.manifest.files if file.table in INDEX_SCHEMAS]
        where = step_folder(self.manifest.run, self.manifest.step)
        return {f"{where}/{file.name}": file for file in own if file.table == name} if own else None

    def _derive(self) -> dict[str, pa.Table]:
        if self._derived is None:
            reader, run = MegReader(self._folder), self.manifest.run
            self._derived = step_index(
                {
                    table: reader.read_table(run, table, self.steps, columns)
                    for table, columns in INDEX_SOURCES.items()
                }
            )
        return self._derived


class BlockPart:
    """A published block."""

    def __init__(self, folder: Folder, block: Block) -> None:
        self.steps, self.num_files = block.steps, block.num_files
        self._folder, self._block = folder, block

    def steps_with(self, table: str) -> list[int]:
        return self._block.rare[table]

    def table(self, name: str, key: str | None = None) -> pa.Table:
        ((path, file),) = self.files(name).items()
        return read_index(self._folder, path, file, key)

    def files(self, name: str) -> dict[str, SealedFile]:
        where = index_folder(self._block.run)
        return {f"{where}/{file.name}": file for file in self._block.files if file.table == name}


def step_part(folder: Folder, run: str, step: int) -> StepPart | None:
    """The step's part; None if it has no manifest."""
    path = f"{step_folder(run, step)}/{MANIFEST}"
    try:
        manifest = parse_manifest(folder.read(path), path)
    except FileNotFoundError:
        return None
    return StepPart(folder, manifest)


def block_part(folder: Folder, run: str, window: Window) -> BlockPart | None:
    """The window's block; None if there is none."""
    path = block_path(run, window)
    try:
        block = parse_block(folder.read(path), path)
    except FileNotFoundError:
        return None
    return BlockPart(folder, block)


def read_index(folder: Folder, path: str, file: SealedFile, key: str | None = None) -> pa.Table:
    """An index file's rows, or those with `key` in the leading column: only their row groups are decoded.

    Raises: CorruptFile if its digest is not that of its manifest.
    """
    data = folder.read(path)
    if (found := file_digest(data)) != file.digest:
        raise CorruptFile(f"{path}: digest {found}, its manifest says {file.digest}")
    if key is None:
        return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
    leading = BLOCK_SCHEMAS[file.table].names[0]
    return pq.read_table(pa.BufferReader(data), filters=[(leading, "==", key)], use_threads=False)


def _only(table: pa.Table, key: str | None) -> pa.Table:
    return table if key is None else table.filter(pc.equal(table.column(0), key))
