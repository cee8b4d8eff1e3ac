"""A folder behind an fsspec URL: whole files in, whole files out, and one way to publish.

Local paths, `memory://`, `s3://` and the like. Nothing is appended and nothing is renamed over a file that a
reader may hold. Synchronous: callers on an event loop go through their `Offload`.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import fsspec


class Folder:
    """Files by their path relative to `root`. Missing files raise `FileNotFoundError`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._fs, self._base = fsspec.core.url_to_fs(root)
        self._is_local = "file" in (
            [self._fs.protocol] if isinstance(self._fs.protocol, str) else self._fs.protocol
        )

    def read(self, path: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._full(path)))
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.root}: no file {path}") from None

    def write(self, path: str, data: bytes) -> None:
        """Writes or overwrites. A reader may see a part of it: only for files that a manifest will name."""
        full = self._full(path)
        self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(full, data)

    def publish(self, path: str, data: bytes) -> None:
        """Creates the file, whole or not at all.

        Raises: FileExistsError if it exists; its content is untouched.
        """
        if not self._is_local:
            self._fs.pipe_file(self._full(path), data, mode="create")
            return
        target = Path(self._full(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        draft.write_bytes(data)
        try:
            os.link(draft, target)  # unlike a rename, a link never replaces
        finally:
            draft.unlink()

    def names(self, path: str) -> list[str]:
        """The sorted names directly under `path`; empty if there is no such folder."""
        self._fs.invalidate_cache()  # another process may have added to it
        try:
            found = self._fs.ls(self._full(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._full(path)))

    def _full(self, path: str) -> str:
        return f"{self._base.rstrip('/')}/{path}"


def file_digest(data: bytes) -> str:
    """32 bytes of blake2b in hex: what manifests hold of each file."""
    return blake2b(data, digest_size=32).hexdigest()
