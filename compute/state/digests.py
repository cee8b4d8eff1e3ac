"""Digests of large files on several threads: blake2b leaves of 8 MiB, and blake2b over the leaves.

digest = blake2b-256("megloom-tree", leaf_0 … leaf_n, size), leaf_i = blake2b-256(bytes of the i-th 8 MiB).
Leaves are independent, so a writer hashes while it writes and a reader hashes on all threads; `hashlib`
releases the interpreter lock meanwhile. The result does not depend on how the bytes were handed over.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

LEAF_BYTES = 8 << 20
NUM_THREADS = 2  # more do not help: two of them read faster than memory lets a third
_DIGEST_BYTES = 32
_PERSON = b"megloom-tree"
_MAX_WAITING = 4  # leaves that wait for a thread: what is written is at most 32 MiB ahead of what is hashed


class Digester:
    """Takes bytes in order; `finish` gives the digest. What it was fed must not change until then."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._pieces: list[memoryview] = []
        self._num_open = 0  # bytes in `_pieces`
        self._waiting: deque[Future[bytes]] = deque()
        self._leaves: list[bytes] = []
        self.size_bytes = 0

    def feed(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.size_bytes += len(view)
        while len(view):
            piece = view[: LEAF_BYTES - self._num_open]
            self._pieces.append(piece)
            self._num_open += len(piece)
            view = view[len(piece) :]
            if self._num_open == LEAF_BYTES:
                self._close_leaf()

    def finish(self) -> str:
        """64 hex digits. The digester is used up."""
        if self._num_open:
            self._close_leaf()
        self._leaves += [leaf.result() for leaf in self._waiting]
        self._waiting.clear()
        return _root(self._leaves, self.size_bytes)

    def _close_leaf(self) -> None:
        self._waiting.append(self._pool.submit(_leaf, self._pieces))
        self._pieces, self._num_open = [], 0
        if len(self._waiting) > _MAX_WAITING:
            self._leaves.append(self._waiting.popleft().result())


@contextmanager
def digester() -> Iterator[Digester]:
    """A `Digester` with threads of its own, which end with the block."""
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="digest") as pool:
        yield Digester(pool)


def tree_digest(path: Path) -> str:
    """The digest of a file, 64 hex digits. Its memory use does not grow with the file."""
    size_bytes = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="digest") as pool:
            offsets = range(0, size_bytes, LEAF_BYTES)
            leaves = list(pool.map(lambda offset: _leaf_at(descriptor, offset), offsets))
    finally:
        os.close(descriptor)
    return _root(leaves, size_bytes)


def _leaf_at(descriptor: int, offset: int) -> bytes:
    return _leaf([memoryview(os.pread(descriptor, LEAF_BYTES, offset))])


def _leaf(pieces: Sequence[memoryview]) -> bytes:
    leaf = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for piece in pieces:
        leaf.update(piece)
    return leaf.digest()


def _root(leaves: Sequence[bytes], size_bytes: int) -> str:
    root = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=_PERSON)
    root.update(b"".join(leaves))
    root.update(size_bytes.to_bytes(8, "little"))
    return root.hexdigest()
