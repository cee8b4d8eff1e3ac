"""Writes safetensors files tensor by tensor: no second copy of the state, and its digest comes for free.

The format: 8 bytes little-endian length of the header, the header (JSON: name → dtype, shape, data_offsets;
`__metadata__` → strings), the tensors' bytes without gaps. Any safetensors reader opens it. No torch here:
the caller gives each tensor's bytes when asked for them, so that a device tensor is on the host only then.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_ALIGNMENT_BYTES = 8  # of the data's begin: mapped tensors are then aligned for every dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """`dtype` by safetensors' name, of `ITEM_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """`digest` is `digests.file_digest` of the file."""

    digest: str
    size_bytes: int


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The file's begin, up to the first tensor.

    Raises: ValueError for a name that comes twice or is reserved, or an unknown dtype.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        if spec.name in header or spec.name == "__metadata__":
            raise ValueError(f"tensor file: the name {spec.name!r} is taken")
        if spec.dtype not in ITEM_BYTES:
            raise ValueError(
                f"tensor {spec.name!r}: dtype {spec.dtype!r}, expected one of {list(ITEM_BYTES)}"
            )
        end = offset + spec.size_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def file_size(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> int:
    """How many bytes `write_tensor_file` will write."""
    return len(header_bytes(specs, metadata)) + sum(spec.size_bytes for spec in specs)


def write_tensor_file(
    path: Path,
    specs: Sequence[TensorSpec],
    bytes_of: Callable[[TensorSpec], memoryview],
    metadata: Mapping[str, str],
) -> WrittenFile:
    """Writes `path` from its begin; a crash leaves a part, so write a draft and move it.

    `bytes_of` is called once per tensor, in order; its bytes must not change before it is called again.
    Raises: ValueError if a tensor has other than its spec's number of bytes; OSError if the disk is full.
    """
    digest, size_bytes = blake3(), 0
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="digest") as hasher:
        for data in _pieces(specs, bytes_of, metadata):
            hashing = hasher.submit(digest.update, data)
            size_bytes += len(data)
            while len(data):
                data = data[os.write(file.fileno(), data) :]
            hashing.result()
    return WrittenFile(digest=digest.hexdigest(), size_bytes=size_bytes)


def _pieces(
    specs: Sequence[TensorSpec], bytes_of: Callable[[TensorSpec], memoryview], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """The file's header, then each tensor's bytes."""
    yield memoryview(header_bytes(specs, metadata))
    for spec in specs:
        data = memoryview(bytes_of(spec)).cast("B")
        if len(data) != spec.size_bytes:
            raise ValueError(f"tensor {spec.name!r}: {len(data)} bytes, expected {spec.size_bytes}")
        yield data
