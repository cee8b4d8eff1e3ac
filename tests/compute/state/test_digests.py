"""A file's digest is BLAKE3's, whatever its size, and sees every change."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3

from megloom.compute.state.digests import PIECE_BYTES, file_digest


@pytest.mark.parametrize(
    "size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 12345]
)
def test_a_files_digest_is_that_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    assert file_digest(tmp_path / "file") == blake3(data).hexdigest()


def test_the_digest_is_the_published_one(tmp_path: Path) -> None:
    """The first of BLAKE3's own test vectors: no input, and the bytes 0, 1, 2 for the third."""
    vectors = {
        b"": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
        bytes([0, 1, 2]): "e1be4d7a8ab5560aa4199eea339849ba8e293d55ca0a81006726d184519e647f",
    }
    for data, digest in vectors.items():
        (tmp_path / "file").write_bytes(data)
        assert file_digest(tmp_path / "file") == digest


def test_a_flipped_bit_a_missing_end_and_swapped_pieces_change_the_digest(tmp_path: Path) -> None:
    data = bytearray(random.Random(0).randbytes(2 * PIECE_BYTES + 10))
    flipped = bytearray(data)
    flipped[PIECE_BYTES + 5] ^= 1
    swapped = data[PIECE_BYTES : 2 * PIECE_BYTES] + data[:PIECE_BYTES] + data[2 * PIECE_BYTES :]
    found = set()
    for number, content in enumerate((data, flipped, swapped, data[:-1], data + b"\0")):
        path = tmp_path / str(number)
        path.write_bytes(content)
        found.add(file_digest(path))
    assert len(found) == 5
