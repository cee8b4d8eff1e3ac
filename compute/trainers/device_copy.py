"""Tensors to state files: the bytes of one tensor at a time, through a pinned buffer on a GPU.

The D2H step of a put; on a CPU the tensors' own memory is written. Never more than one tensor, or one buffer
of it, is on the host twice. A reader maps the file and copies each tensor to where it belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megloom.compute.state.tensor_file import TensorSpec, WrittenFile, write_tensor_file

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
BUFFER_BYTES = 64 << 20  # pinned: large enough for full PCIe speed, small enough to keep


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """How the tensor is described in a file.

    Raises: ValueError for a dtype that safetensors has no name for here.
    """
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"tensor {name!r}: dtype {tensor.dtype}, expected one of {list(DTYPE_NAMES)}")
    return TensorSpec(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> WrittenFile:
    """Writes all tensors to `path`, one after the other; the file's digest and size.

    A crash leaves a part of the file: write a draft. Raises: OSError if the disk is full.
    """
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    buffers = HostBuffers()
    return write_tensor_file(path, specs, lambda spec: buffers.host_bytes(tensors[spec.name]), metadata)


class HostBuffers:
    """One pinned buffer, made at the first use of a GPU and used for all copies of its owner, in turns."""

    def __init__(self, size_bytes: int = BUFFER_BYTES) -> None:
        self._size_bytes = size_bytes
        self._pinned: Tensor | None = None

    def host_bytes(self, tensor: Tensor) -> memoryview:
        """The tensor's bytes on the host: a view of a contiguous CPU tensor, else a copy."""
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel() == 0:
            return memoryview(b"")
        flat = flat.view(torch.uint8)
        if flat.device.type == "cpu":
            return memoryview(flat.numpy())
        host = torch.empty(len(flat), dtype=torch.uint8)
        for begin in range(0, len(flat), self._size_bytes):
            piece = flat[begin : begin + self._size_bytes]
            pinned = self._buffer()[: len(piece)]
            pinned.copy_(piece)  # waits for the device, so the buffer is free again after the next line
            host[begin : begin + len(piece)].copy_(pinned)
        return memoryview(host.numpy())

    def _buffer(self) -> Tensor:
        if self._pinned is None:
            self._pinned = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned
