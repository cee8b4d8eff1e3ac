"""The lineage index as the store calls it: each step's own part at the seal, and compaction after it.

A sealed step carries the tables of `step_index`. `compact` merges those of ten steps into a block, ten blocks
into a larger one, and so on, so that a question about a long run opens few files.
"""

from __future__ import annotations

import contextlib

import pyarrow as pa

from megloom.compute.store.files import Folder, file_digest
from megloom.compute.store.lineage.blocks import (
    FAN_OUT,
    Block,
    Window,
    block_bytes,
    block_path,
    index_bytes,
    index_folder,
    window_of,
    windows_in,
)
from megloom.compute.store.lineage.index_tables import BLOCK_SCHEMAS, INDEX_SCHEMAS, sorted_index, step_index
from megloom.compute.store.lineage.parts import RARE_TABLES, Part, block_part, step_part
from megloom.compute.store.manifest import SealedFile, run_folder, step_of

__all__ = ["INDEX_SCHEMAS", "compact", "index_bytes", "step_index"]


def compact(folder: Folder, run: str, step: int, *, fan_out: int = FAN_OUT) -> None:
    """Makes the block of every window that ends at or before `step`, the newest sealed one, and has none.

    Idempotent, and safe against a kill: a block's files come first, its manifest last, and the same steps
    give the same bytes. Steps without an index of their own get one from their tables.
    """
    found = (step_of(name) for name in folder.names(run_folder(run)))
    steps = sorted(at for at in found if at is not None and at <= step)
    done = set(windows_in(folder.names(index_folder(run))))
    size = fan_out
    while closed := sorted({w for w in (window_of(at, size) for at in steps) if w.last <= step}):
        for window in closed:
            if window in done:
                continue
            inside = [at for at in steps if at in window]
            if size == fan_out:
                parts: list[Part | None] = [step_part(folder, run, at) for at in inside]
            else:
                below = sorted({window_of(at, size // fan_out) for at in inside})
                parts = [block_part(folder, run, w) for w in below]
            _write_block(folder, run, window, [part for part in parts if part is not None])
        size *= fan_out


def _write_block(folder: Folder, run: str, window: Window, parts: list[Part]) -> None:
    if not parts:
        return
    files = []
    for name in BLOCK_SCHEMAS:
        table = sorted_index(pa.concat_tables([part.table(name) for part in parts]))
        data = index_bytes(table)
        file = SealedFile(
            name=f"{window.name}-{name.removeprefix('index_')}.parquet",
            table=name,
            agent=None,
            num_rows=table.num_rows,
            size_bytes=len(data),
            digest=file_digest(data),
        )
        folder.write(f"{index_folder(run)}/{file.name}", data)
        files.append(file)
    block = Block(
        run=run,
        first=window.first,
        last=window.last,
        steps=tuple(step for part in parts for step in part.steps),
        num_files=sum(part.num_files for part in parts),
        rare={table: [step for part in parts for step in part.steps_with(table)] for table in RARE_TABLES},
        files=tuple(files),
    )
    with contextlib.suppress(FileExistsError):  # another process was faster, with the same bytes
        folder.publish(block_path(run, window), block_bytes(block))
