"""A folder that several nodes see, behind an fsspec URL: a network file system, a bucket.

    <root>/<run>/<policy>/<kind>/v000012-<digest>    the bytes, named by content: two writers never collide
    <root>/<run>/<policy>/<kind>/v000012.json        the entry, published last; without it there is no object

`SharedFolder` is synchronous and also the store's lowest tier; `FolderTransport` is the way between nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec

from megloom.compute.state.errors import DISK_FULL, ConflictingState, TransportError
from megloom.compute.state.index import Entry
from megloom.compute.state.keys import Key
from megloom.compute.store.offload import Offload


def object_name(entry: Entry) -> str:
    """An object's file, under any root."""
    return f"{entry.key}-{entry.digest[:32]}"


class SharedFolder:
    """Objects under an fsspec URL. What the file system refuses is a `TransportError` with the object's name.

    Raises: TransportError if the URL's scheme needs a package that is not installed.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self._fs, self._base = fsspec.core.url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise TransportError(f"{root}: {error}") from error
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._is_local = "file" in protocols
        self._has_folders = self._is_local or "memory" in protocols

    def describe(self, key: Key) -> Entry | None:
        """The object's entry, None if there is none."""
        self._fs.invalidate_cache()  # another node may have published it
        try:
            with self._named("read the entry of", key):
                values = json.loads(self._fs.cat_file(self._full(f"{key}.json")))
                return Entry(key=key, digest=str(values["digest"]), size_bytes=int(values["size_bytes"]))
        except FileNotFoundError:
            return None

    def fetch(self, entry: Entry, path: Path) -> None:
        """Copies the object's bytes to `path`.

        Raises: TransportError if they are gone; OSError if the caller's disk is full.
        """
        try:
            with self._named("fetch", entry.key):
                self._fs.get_file(self._full(object_name(entry)), str(path))
        except FileNotFoundError as error:
            raise TransportError(f"{self.root}: {entry.key} has an entry and no bytes") from error
        except TransportError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL:
                raise error.__cause__ from None
            raise

    def push(self, entry: Entry, path: Path) -> None:
        """Stores the bytes, then the entry.

        Raises: ConflictingState if the key has other content.
        """
        known = self.describe(entry.key)
        if known is not None:
            require_same(known, entry, self.root)
            return
        full = self._full(object_name(entry))
        with self._named("store", entry.key):
            if self._has_folders:
                self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            self._put(str(path), full)
            text = json.dumps({"digest": entry.digest, "size_bytes": entry.size_bytes}).encode()
            self._publish(self._full(f"{entry.key}.json"), text)

    def drop(self, key: Key) -> None:
        """Removes the entry, then the bytes."""
        entry = self.describe(key)
        if entry is not None:
            with self._named("remove", key):
                for name in (f"{key}.json", object_name(entry)):
                    with suppress(FileNotFoundError):
                        self._fs.rm_file(self._full(name))

    def _put(self, source: str, target: str) -> None:
        if not self._is_local:
            self._fs.put_file(source, target)  # a bucket shows whole objects only
            return
        draft = f"{target}.draft"
        try:
            self._fs.put_file(source, draft)
            Path(draft).replace(target)
        finally:
            Path(draft).unlink(missing_ok=True)

    def _publish(self, target: str, text: bytes) -> None:
        if not self._is_local:
            self._fs.pipe_file(target, text)
            return
        draft = Path(f"{target}.draft")
        draft.write_bytes(text)
        draft.replace(target)

    def _full(self, name: str) -> str:
        return f"{self._base.rstrip('/')}/{name}"

    @contextmanager
    def _named(self, verb: str, key: Key) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # a boundary: each file system raises the errors of its own library
            raise TransportError(f"{self.root}: cannot {verb} {key}: {error}") from error


class FolderTransport:
    """A `Transport` over a `SharedFolder`; its blocking work goes through `offload`."""

    name = "file"
    is_cache = False

    def __init__(self, root: str, offload: Offload) -> None:
        self._folder, self._offload = SharedFolder(root), offload

    async def describe(self, key: Key) -> Entry | None:
        return await self._offload.run(self._folder.describe, key)

    async def fetch(self, entry: Entry, path: Path) -> None:
        await self._offload.run(self._folder.fetch, entry, path)

    async def push(self, entry: Entry, path: Path) -> None:
        await self._offload.run(self._folder.push, entry, path)

    async def drop(self, key: Key) -> None:
        await self._offload.run(self._folder.drop, key)

    async def close(self) -> None:
        pass


def require_same(known: Entry, offered: Entry, where: str) -> None:
    """Raises: ConflictingState, naming both digests, if two entries of one key differ."""
    if (known.digest, known.size_bytes) != (offered.digest, offered.size_bytes):
        raise ConflictingState(
            f"{where}: {known.key} is there with digest {known.digest} ({known.size_bytes} bytes); refused to"
            f" replace it by digest {offered.digest} ({offered.size_bytes} bytes)"
        )
