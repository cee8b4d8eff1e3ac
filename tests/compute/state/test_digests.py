"""A file's digest does not depend on threads or on how its bytes came, and sees every change."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from megloom.compute.state.digests import LEAF_BYTES, digester, tree_digest


def slow_digest(data: bytes) -> str:
    """The definition, in one thread."""
    leaves = b"".join(
        hashlib.blake2b(data[begin : begin + LEAF_BYTES], digest_size=32).digest()
        for begin in range(0, len(data), LEAF_BYTES)
    )
    size = len(data).to_bytes(8, "little")
    return hashlib.blake2b(leaves + size, digest_size=32, person=b"megloom-tree").hexdigest()


@pytest.mark.parametrize("size", [0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES + 12345])
def test_file_and_pieces_have_the_digest_of_the_definition(tmp_path: Path, size: int) -> None:
    rng = random.Random(size)
    data = rng.randbytes(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert tree_digest(path) == slow_digest(data)
    with digester() as digest:
        begin = 0
        while begin < size:
            end = begin + rng.choice((1, 1000, LEAF_BYTES // 3, LEAF_BYTES, 3 * LEAF_BYTES))
            digest.feed(data[begin:end])
            begin = end
        assert digest.finish() == slow_digest(data) and digest.size_bytes == size


def test_a_flipped_bit_a_missing_end_and_swapped_leaves_change_the_digest(tmp_path: Path) -> None:
    data = bytearray(random.Random(0).randbytes(2 * LEAF_BYTES + 10))
    flipped = bytearray(data)
    flipped[LEAF_BYTES + 5] ^= 1
    swapped = data[LEAF_BYTES : 2 * LEAF_BYTES] + data[:LEAF_BYTES] + data[2 * LEAF_BYTES :]
    found = set()
    for number, content in enumerate((data, flipped, swapped, data[:-1], data + b"\0")):
        path = tmp_path / str(number)
        path.write_bytes(content)
        found.add(tree_digest(path))
    assert len(found) == 5
