"""A run as lineage reads it: its blocks, the sealed steps that no block covers, and single steps on demand.

Two listings and one manifest per part open a run; the rest is read when a question needs it, and counted.
Synchronous; any number of processes may read while the conductor seals.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.blocks import cover, index_folder, windows_in
from megloom.compute.store.lineage.index_tables import BLOCK_SCHEMAS
from megloom.compute.store.lineage.parts import Part, block_part, step_part
from megloom.compute.store.manifest import SealedFile, run_folder, step_of
from megloom.compute.store.reader import MegReader


class _CountingFolder(Folder):
    """Remembers the files that were read."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.opened: set[str] = set()

    def read(self, path: str) -> bytes:
        data = super().read(path)
        self.opened.add(path)
        return data


class RunIndex:
    """The sealed steps of a run under `root`, a local path or an fsspec URL.

    Damaged files raise `CorruptFile`.

    Raises: FileNotFoundError if the run has no sealed step.
    """

    def __init__(self, root: str, run: str) -> None:
        self.root, self.run = root, run
        self.folder = _CountingFolder(root)
        self._reader = MegReader(self.folder)
        self._tables: dict[str, pa.Table] = {}
        self._parts = self._open_parts()
        self.steps = tuple(sorted(step for part in self._parts for step in part.steps))
        if not self.steps:
            known = [name for name in self._reader.runs() if name != run]
            raise FileNotFoundError(f"{root}: run {run} has no sealed step{did_you_mean(run, known)}")

    @property
    def num_files_opened(self) -> int:
        return len(self.folder.opened)

    @cached_property
    def num_files(self) -> int:
        """How many files the run has: those of its steps with their manifests, and those of the index."""
        num_sealed = sum(part.num_files for part in self._parts)
        return num_sealed + len(self.folder.names(index_folder(self.run)))

    def table(self, name: str) -> pa.Table:
        """All rows of an index table, `FILES` among them; in no order."""
        if name not in self._tables:
            self._tables[name] = self._concat(name, None)
        return self._tables[name]

    def rows_of(self, name: str, key: str) -> list[dict[str, Any]]:
        """The rows of an index table with `key` in its leading column; little of the rest is decoded."""
        return list(self._concat(name, key).to_pylist())

    def index_files(self, name: str) -> tuple[dict[str, SealedFile], pa.Table | None]:
        """The files of an index table by their paths, and the rows of the steps that have none."""
        files: dict[str, SealedFile] = {}
        derived = []
        for part in self._parts:
            if (own := part.files(name)) is None:
                derived.append(part.table(name))
            else:
                files |= own
        return files, pa.concat_tables(derived) if derived else None

    def steps_with(self, table: str) -> list[int]:
        """The steps that have tasks, or provenance: few do."""
        return [step for part in self._parts for step in part.steps_with(table)]

    def read(self, table: str, steps: Iterable[int], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a sealed table over `steps`."""
        return self._reader.read_table(self.run, table, sorted(set(steps)), columns)

    def _open_parts(self) -> list[Part]:
        found = (step_of(name) for name in self.folder.names(run_folder(self.run)))
        windows = cover(windows_in(self.folder.names(index_folder(self.run))))
        parts: list[Part] = []
        for window in windows:
            if (block := block_part(self.folder, self.run, window)) is not None:
                parts.append(block)
        for step in sorted(s for s in found if s is not None and not any(s in w for w in windows)):
            if (part := step_part(self.folder, self.run, step)) is not None:
                parts.append(part)
        return parts

    def _concat(self, name: str, key: str | None) -> pa.Table:
        schema = BLOCK_SCHEMAS[name]
        return pa.concat_tables([schema.empty_table(), *(part.table(name, key) for part in self._parts)])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the nearest of the known names, "" if there is none."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f", did you mean {near[0]!r}?" if near else ""
