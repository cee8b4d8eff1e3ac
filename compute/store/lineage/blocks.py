"""Blocks of the lineage index: their names, their manifests, and which blocks cover a run.

A block holds the index of all sealed steps of one aligned window of 10, 100, 1000, … steps. Layout:
`meg/<run>/index/000010-000019.json` names the block's Parquet files `000010-000019-edges.parquet`, …; it is
published last, so a block without it does not exist. Blocks stay when a larger one covers them: a reader may
hold them. The whole folder is derived: deleted, it is made again from the steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from megloom.compute.store.errors import StoreError
from megloom.compute.store.manifest import SealedFile, read_signed_json, run_folder, signed_json

FAN_OUT = 10
BLOCK_VERSION = 1
ROW_GROUP = 8_192  # rows; the tables are sorted, so a task is found by decoding one group per block
_BLOCK = re.compile(r"(\d{6,})-(\d{6,})\.json")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Window:
    """The steps `first` to `last`, both included."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        return f"{self.first:06d}-{self.last:06d}"

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block's manifest. `steps` are the sealed steps of its window, `num_files` counts their files.

    `files` are the block's own, in the index folder.
    `rare` names, for tables that few steps have (tasks, provenance), the steps that have them.
    """

    run: str
    first: int
    last: int
    steps: tuple[int, ...]
    num_files: int
    rare: dict[str, list[int]]
    files: tuple[SealedFile, ...]
    block_version: int = BLOCK_VERSION


def index_folder(run: str) -> str:
    return f"{run_folder(run)}/index"


def block_path(run: str, window: Window) -> str:
    return f"{index_folder(run)}/{window.name}.json"


def windows_in(names: Iterable[str]) -> list[Window]:
    """The windows of the blocks among the file names of an index folder."""
    found = (_BLOCK.fullmatch(name) for name in names)
    return sorted(Window(first=int(m[1]), last=int(m[2])) for m in found if m)


def cover(windows: Iterable[Window]) -> list[Window]:
    """The fewest windows that cover the same steps. Windows are aligned, so two are nested or apart."""
    chosen: list[Window] = []
    for window in sorted(windows, key=lambda w: (w.first, -w.last)):
        if not chosen or window.first > chosen[-1].last:
            chosen.append(window)
    return chosen


def window_of(step: int, size: int) -> Window:
    """The aligned window of `size` steps that holds `step`."""
    first = step - step % size
    return Window(first=first, last=first + size - 1)


def block_bytes(block: Block) -> bytes:
    """JSON with a digest of its own content."""
    return signed_json("block", asdict(block))


def parse_block(data: bytes, path: str) -> Block:
    """The inverse of `block_bytes`.

    Raises: CorruptFile, naming `path`; StoreError if a newer version of this program wrote it.
    """
    content = read_signed_json("block", data, path, what="an index block")
    if content["block_version"] > BLOCK_VERSION:
        raise StoreError(
            f"{path}: index version {content['block_version']}, this reader knows {BLOCK_VERSION}"
        )
    files = tuple(SealedFile(**file) for file in content.pop("files"))
    steps = tuple(content.pop("steps"))
    return Block(files=files, steps=steps, **content)


def index_bytes(table: pa.Table) -> bytes:
    """The table as Parquet in small row groups with statistics. Equal tables give equal bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP, write_statistics=True)
    return bytes(sink.getvalue())
