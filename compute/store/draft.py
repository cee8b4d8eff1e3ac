"""A file in the making, whose name is known when its content is: `Folder.draft` gives one.

On a local disk it grows as a hidden file beside its place and is then renamed; elsewhere it grows in memory
and is uploaded whole. Its digest is taken on the way.
"""

from __future__ import annotations

import io
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from megloom.compute.store.errors import StoreError


class Draft(io.RawIOBase):
    """Takes bytes. `path` is its hidden file, None if it grows in memory. Its folder closes it."""

    def __init__(self, where: str, target: BinaryIO, path: Path | None) -> None:
        self.path = path
        self.size_bytes = 0
        self._where, self._target = where, target
        self._hash = blake2b(digest_size=32)
        self._is_discarded = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Raises: StoreError if the disk takes no more."""
        view = memoryview(data).cast("B")
        if self._is_discarded:
            return view.nbytes
        self._hash.update(view)
        self.size_bytes += view.nbytes
        left = view
        try:
            while left:  # an almost full disk takes a part, and says so only by its size
                left = left[self._target.write(left) :]
        except OSError as error:
            raise StoreError(f"cannot write a file of {self._where}: {error}") from error
        return view.nbytes

    def discard(self) -> None:
        """Takes no more bytes: a Parquet writer that is given up writes its footer when it is collected."""
        self._is_discarded = True

    def digest(self) -> str:
        """What `file_digest` says of all that was written."""
        return self._hash.hexdigest()

    def content(self) -> bytes:
        """All that was written to a draft in memory."""
        assert isinstance(self._target, io.BytesIO)
        return self._target.getvalue()
