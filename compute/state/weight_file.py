"""Safetensors files of weights as bytes: their layout, and the cast to bfloat16, piece by piece in numpy.

Layout: 8 bytes (little endian) length of a JSON header, the header, the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
MAX_HEADER_BYTES = 100_000_000  # the format's own bound
CHUNK_BYTES = 1 << 23  # of one piece of work: bounds the memory of a cast or a delta


class WeightFileError(Exception):
    """Not a safetensors file, or one with a dtype that is not known here. The message names the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor in a file: its bytes are `[start, end)` of the whole file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a file's header says. `head` is all before the first tensor, `entries` are in file order."""

    head: bytes
    entries: tuple[Entry, ...]
    metadata: dict[str, str]


def read_layout(path: Path) -> Layout:
    """The layout of a whole file.

    Raises: WeightFileError if it is none, or is cut; FileNotFoundError.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
            raise WeightFileError(f"{path}: no safetensors file (header of {length} bytes)")
        head = length.to_bytes(8, "little") + file.read(length)
    layout = parse_head(head, str(path))
    end = layout.entries[-1].end if layout.entries else len(head)
    if end != size_bytes:
        raise WeightFileError(f"{path}: {size_bytes} bytes, its header says {end}")
    return layout


def parse_head(head: bytes, name: str) -> Layout:
    """The layout that a file's first bytes describe. Raises: WeightFileError, naming `name`."""
    try:
        values: dict[str, Any] = json.loads(head[8:])
        metadata = dict(values.pop("__metadata__", {}))
        entries = [
            Entry(
                name=tensor,
                dtype=value["dtype"],
                shape=tuple(value["shape"]),
                start=len(head) + value["data_offsets"][0],
                end=len(head) + value["data_offsets"][1],
            )
            for tensor, value in values.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise WeightFileError(f"{name}: header unreadable: {error!r}") from error
    entries.sort(key=lambda entry: (entry.start, entry.end))
    at = len(head)
    for entry in entries:
        if entry.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise WeightFileError(f"{name}: tensor {entry.name} has dtype {entry.dtype}, known: {known}")
        size = entry.item_bytes * int(np.prod(entry.shape, dtype=np.int64))
        if (entry.start, entry.end) != (at, at + size):
            raise WeightFileError(
                f"{name}: tensor {entry.name} lies at {entry.start}..{entry.end}, expected {at}..{at + size}"
            )
        at = entry.end
    return Layout(head=head, entries=tuple(entries), metadata=metadata)


def mapped(path: Path) -> Bytes:
    """The file's bytes, mapped read-only."""
    return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)


def chunks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Cuts a tensor's bytes into pieces of whole items: (start, end) in the file."""
    for start in range(entry.start, entry.end, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, entry.end)


def has_dtype(path: Path, dtype: str) -> bool:
    """True if a tensor of the file has this dtype. Raises: WeightFileError."""
    return any(entry.dtype == dtype for entry in read_layout(path).entries)


def cast_to_bfloat16(source: Path, target: Path) -> None:
    """Writes `source` with its float32 tensors rounded to the nearest bfloat16, ties to even.

    Other tensors stay as they are; a NaN stays a NaN. Raises: WeightFileError.
    """
    layout = read_layout(source)
    head: dict[str, Any] = {"__metadata__": layout.metadata} if layout.metadata else {}
    at = 0
    for entry in layout.entries:
        is_cast = entry.dtype == "F32"
        size = (entry.end - entry.start) // (2 if is_cast else 1)
        dtype = "BF16" if is_cast else entry.dtype
        head[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    data = mapped(source)
    with target.open("wb") as file:
        _write_head(file, head)
        for entry in layout.entries:
            for start, end in chunks(entry):
                piece = data[start:end]
                file.write((_bfloat16(piece) if entry.dtype == "F32" else piece).tobytes())


def _write_head(file: BinaryIO, head: dict[str, Any]) -> None:
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors' bytes begin aligned
    file.write(len(text).to_bytes(8, "little") + text)


def _bfloat16(piece: Bytes) -> npt.NDArray[np.uint16]:
    bits = piece.copy().view("<u4")  # a copy: the piece may not be aligned
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000  # rounding could carry a NaN over into another number
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype("<u2")
