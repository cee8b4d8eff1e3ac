"""Digests of large files: BLAKE3, one thread of which keeps up with the writing of a file in memory."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

PIECE_BYTES = 1 << 20  # is still in a core's own cache when it is hashed


def file_digest(path: Path) -> str:
    """BLAKE3 of a file, 64 hex digits. Its memory use does not grow with the file. Raises: OSError."""
    digest, buffer = blake3(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            digest.update(buffer[:num_read])
    return digest.hexdigest()
