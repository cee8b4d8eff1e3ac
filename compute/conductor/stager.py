"""Brings a version's files to the nodes of its engines, while those still serve the old one.

Phase one of a publish. Where engines load from the trainer's disk that is a check of the digest (and, for a
delta of which the trainer left no whole copy, one rebuild); where they load from folders of their own
(`cells.engine_folders`) the files go there in chunks, and a try that failed is continued where it stopped.
Nothing that an engine serves changes here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megloom.compute.state.digests import file_digest
from megloom.compute.state.staging import full_folder
from megloom.compute.state.weights import MODEL_FILE, WeightsError
from megloom.compute.store.offload import Offload
from megloom.compute.trainers.protocol import Published

CHUNK_BYTES = 8 << 20


class StagingError(Exception):
    """A node could not take a version's files, or took others. The message names the cell or node."""


class Stager(Protocol):
    """`stage` may be called again after a failure."""

    async def stage(self, cell: str, published: Published) -> str:
        """The folder on the cell's node that its engine is to load, whole and verified.

        Raises: StagingError.
        """
        ...


class LocalStager:
    """Engines on the trainer's machine: they load from the same disk. One check serves all of a policy."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._locks: dict[str, asyncio.Lock] = {}  # by policy folder: the first cell checks, others wait
        self._staged: dict[
            str, tuple[Published, str]
        ] = {}  # policy folder → its last publish, and the folder

    async def stage(self, cell: str, published: Published) -> str:
        policy = str(Path(published.uri).parent)
        async with self._locks.setdefault(policy, asyncio.Lock()):
            last, folder = self._staged.get(policy, (None, ""))
            if last != published:  # the digest alone is not enough: another version may have the same weights
                folder = await self._offload.run(_whole_folder, cell, published.uri, published.digest)
                self._staged[policy] = published, folder
            return folder


class Node(Protocol):
    """Where engines load from: another machine's disk, as whoever sends files to it sees it."""

    async def received(self, name: str, file: str) -> int:
        """How many bytes of a file of version `name` are there."""
        ...

    async def append(self, name: str, file: str, offset: int, data: bytes) -> None:
        """Writes `data` at `offset`, which is what `received` says. Raises: StagingError, OSError."""
        ...

    async def finish(self, name: str, digest: str) -> str:
        """The folder, once its weights' digest is right. Raises: StagingError; then the files are gone."""
        ...


class ChunkStager:
    """Sends a version's whole folder to the node of each cell, once per node."""

    def __init__(
        self, *, node_of: Callable[[str], Node], offload: Offload, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._node_of, self._offload, self._chunk_bytes = node_of, offload, chunk_bytes
        self._locks: dict[int, asyncio.Lock] = {}

    async def stage(self, cell: str, published: Published) -> str:
        node = self._node_of(cell)
        async with self._locks.setdefault(id(node), asyncio.Lock()):
            source = Path(await self._offload.run(_whole_folder, cell, published.uri, published.digest))
            policy = Path(published.uri).parent.name  # a rebuilt delta lies elsewhere
            name = f"{policy}-{published.version:06d}-{published.digest[:16]}"
            try:
                for path, size_bytes in await self._offload.run(_listing, source):
                    await self._send(node, name, path, size_bytes)
                return await node.finish(name, published.digest)
            except OSError as error:
                raise StagingError(f"{cell}: {error}") from error

    async def _send(self, node: Node, name: str, path: Path, size_bytes: int) -> None:
        at = await node.received(name, path.name)
        while at < size_bytes or not size_bytes:
            data = await self._offload.run(_read, path, at, self._chunk_bytes)
            await node.append(name, path.name, at, data)
            at += len(data)
            if not data:
                return


class FolderNode:
    """A node whose disk is a folder here, such as a mounted one; it keeps a policy's last two versions."""

    def __init__(self, root: Path, offload: Offload) -> None:
        self._root, self._offload = root, offload
        self._last: dict[str, str] = {}  # policy → what it finished last

    async def received(self, name: str, file: str) -> int:
        path = self._root / name / file
        return path.stat().st_size if path.is_file() else 0

    async def append(self, name: str, file: str, offset: int, data: bytes) -> None:
        await self._offload.run(_append, self._root / name / file, offset, data)

    async def finish(self, name: str, digest: str) -> str:
        folder = self._root / name
        found = await self._offload.run(file_digest, folder / MODEL_FILE)
        if found != digest:
            shutil.rmtree(folder)
            raise StagingError(f"{folder}: weights have digest {found}, expected {digest}")
        policy = _policy_of(name)
        if (last := self._last.get(policy)) != name:
            await self._offload.run(self._remove_others, policy, {name, last})
            self._last[policy] = name
        return str(folder)

    def _remove_others(self, policy: str, kept: set[str | None]) -> None:
        for folder in self._root.iterdir():
            if folder.name not in kept and _policy_of(folder.name) == policy:
                shutil.rmtree(folder)


def _policy_of(name: str) -> str:
    return name.rsplit("-", 2)[0]  # a policy's own name may have the sign too


def _whole_folder(cell: str, uri: str, digest: str) -> str:
    try:
        folder = full_folder(Path(uri), verified=False)
        found = file_digest(folder / MODEL_FILE)
    except (WeightsError, OSError) as error:
        raise StagingError(f"{cell}: {error}") from error
    if found != digest:
        raise StagingError(f"{cell}: weights in {folder} have digest {found}, expected {digest}")
    return str(folder)


def _listing(folder: Path) -> list[tuple[Path, int]]:
    return [(path, path.stat().st_size) for path in sorted(folder.iterdir())]


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _append(path: Path, offset: int, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if file.tell() != offset:
            raise StagingError(f"{path}: has {file.tell()} bytes, a chunk came for {offset}")
        file.write(data)
        os.fsync(file.fileno())
