"""A folder behind an fsspec URL: whole files in, whole files out, and one way to publish.

Local paths, `file://`, `memory://`, `s3://` and the like. Nothing is appended and nothing is renamed over a
file that a reader may hold. Synchronous: callers on an event loop go through their `Offload`.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import fsspec

from megloom.compute.store.draft import Draft
from megloom.compute.store.errors import StoreError

DRAFT = ".draft-"  # how the names of files in the making begin


class Folder:
    """Files by their path relative to `root`. Missing files raise `FileNotFoundError`.

    What the disk or the bucket refuses (full, read-only, no permission, unreachable) raises `StoreError` with
    the file's name. `s3://bucket/prefix` needs the `s3` extra and takes credentials, region and endpoint from
    the usual variables: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_DEFAULT_REGION,
    AWS_ENDPOINT_URL, or AWS_PROFILE. The bucket must exist and honour `If-None-Match: *` on writes.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self._fs, self._base = fsspec.core.url_to_fs(root)
        except ImportError as error:
            scheme = root.partition("://")[0]
            hint = ": pip install 'megloom[s3]'" if scheme in ("s3", "s3a") else f" ({error})"
            raise StoreError(f"{root}: files of {scheme}:// need a package that is not here{hint}") from error
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._is_local = "file" in protocols
        self._has_folders = self._is_local or "memory" in protocols

    def read(self, path: str) -> bytes:
        with self._named("read", path):
            return bytes(self._fs.cat_file(self._full(path)))

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Writes or overwrites. A reader may see a part of it: only for files that a manifest will name."""
        full = self._full(path)
        with self._named("write", path, missing=False):
            if self._has_folders:
                self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            if self._is_local:
                Path(full).write_bytes(data)
            else:
                self._fs.pipe_file(full, bytes(data))

    def publish(self, path: str, data: bytes) -> None:
        """Creates the file, whole or not at all.

        Raises: FileExistsError if it exists; its content is untouched.
        """
        full = self._full(path)
        with self._named("write", path, missing=False):
            if not self._is_local:
                self._fs.pipe_file(full, data, mode="create")
                return
            target = Path(full)
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f"{DRAFT}{uuid.uuid4().hex}")
            try:
                draft.write_bytes(data)
                os.link(draft, target)  # unlike a rename, a link never replaces
            finally:
                draft.unlink(missing_ok=True)

    @contextmanager
    def draft(self, where: str) -> Iterator[Draft]:
        """A file to fill and then to `keep`; what is not kept when the block ends is gone."""
        if not self._is_local:
            draft = Draft(f"{self.root}/{where}", io.BytesIO(), None)
            try:
                yield draft
            finally:
                draft.discard()
            return
        path = Path(self._full(where)) / f"{DRAFT}{uuid.uuid4().hex}"
        with self._named("write", where, missing=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb", buffering=0)
        with file:
            draft = Draft(f"{self.root}/{where}", file, path)
            try:
                yield draft
            finally:
                draft.discard()
                path.unlink(missing_ok=True)

    def keep(self, draft: Draft, path: str) -> None:
        """Puts a draft in its place. It may replace a file: name it by its content."""
        if draft.path is None:
            self.write(path, draft.content())
            return
        with self._named("write", path, missing=False):
            draft.path.replace(self._full(path))

    def remove(self, path: str) -> None:
        """Removes a file; one that is gone already is fine."""
        with suppress(FileNotFoundError), self._named("remove", path):
            self._fs.rm_file(self._full(path))

    def names(self, path: str) -> list[str]:
        """The sorted names directly under `path`; empty if there is no such folder."""
        self._fs.invalidate_cache()  # another process may have added to it
        try:
            with self._named("list", path):
                found = self._fs.ls(self._full(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def folders_with(self, path: str, name: str) -> list[str]:
        """The sorted names of the folders directly under `path` that hold a file `name`."""
        if self._has_folders:
            return [folder for folder in self.names(path) if self.exists(f"{path}/{folder}/{name}")]
        self._fs.invalidate_cache()
        with self._named("list", path):  # one listing: a request per folder would take minutes on a bucket
            found = self._fs.glob(f"{self._full(path)}/*/{name}")
        return sorted(str(full).split("/")[-2] for full in found)

    def exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        with self._named("look for", path):
            return bool(self._fs.exists(self._full(path)))

    def _full(self, path: str) -> str:
        return f"{self._base.rstrip('/')}/{path}"

    @contextmanager
    def _named(self, verb: str, path: str, *, missing: bool = True) -> Iterator[None]:
        """Names the object in every error. `missing`: whether a missing file is the caller's to handle."""
        try:
            yield
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            if missing:
                raise FileNotFoundError(f"{self.root}: no file {path}") from None
            raise StoreError(f"{self.root}: cannot {verb} {path}: {error}") from error
        except Exception as error:  # a boundary: each file system raises the errors of its own library
            raise StoreError(f"{self.root}: cannot {verb} {path}: {error}") from error


def file_digest(data: bytes | memoryview) -> str:
    """32 bytes of blake2b in hex: what manifests hold of each file."""
    return blake2b(data, digest_size=32).hexdigest()
