"""The way through a Mooncake store (extra `mooncake`): a shared cache over TCP or RDMA.

It drops what it likes, answers with codes instead of errors, and a put on a name that exists keeps the old
value. So an object is pieces named by its digest, then an entry that is read back after it was put; a piece
that is gone makes the object gone. The library needs libibverbs, also for TCP, and is imported late.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megloom.compute.state.errors import TransportError
from megloom.compute.state.index import Entry
from megloom.compute.state.keys import Key
from megloom.compute.state.transports.folder import object_name, require_same
from megloom.compute.store.offload import Offload

PIECE_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeSettings:
    """`master` is host:port of `mooncake_master`, `hostname` this process's address for its peers.

    A client with `segment_bytes` 0 holds nothing itself; then another process must lend memory.
    `buffer_bytes` must hold some pieces of `PIECE_BYTES`.
    """

    master: str
    hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 64 << 20


class MooncakeTransport:
    """A `Transport`. Connects at its first use; `offload` does all calls of the library.

    Raises: TransportError if the library or one that it needs is missing.
    """

    name = "mooncake"
    is_cache = True

    def __init__(self, settings: MooncakeSettings, offload: Offload) -> None:
        self._settings, self._offload = settings, offload
        self._store_class = load_library()
        self._client: Any = None
        self._connecting = threading.Lock()  # guards the making of the client

    async def describe(self, key: Key) -> Entry | None:
        return await self._offload.run(self._entry, key)

    async def fetch(self, entry: Entry, path: Path) -> None:
        await self._offload.run(self._fetch, entry, path)

    async def push(self, entry: Entry, path: Path) -> None:
        await self._offload.run(self._push, entry, path)

    async def drop(self, key: Key) -> None:
        await self._offload.run(self._drop, key)

    async def close(self) -> None:
        if self._client is not None:
            await self._offload.run(self._client.close)

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                client, wanted = self._store_class(), self._settings
                code = client.setup(
                    wanted.hostname,
                    "P2PHANDSHAKE",
                    wanted.segment_bytes,
                    wanted.buffer_bytes,
                    wanted.protocol,
                    wanted.devices,
                    wanted.master,
                )
                if code != 0:
                    raise TransportError(f"mooncake at {wanted.master}: setup gave code {code}, expected 0")
                self._client = client
            return self._client

    def _entry(self, key: Key) -> Entry | None:
        client = self._connected()
        data = client.get(_entry_name(key))
        if not data:
            return None
        try:
            values = json.loads(data)
            entry = Entry(key=key, digest=str(values["digest"]), size_bytes=int(values["size_bytes"]))
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"mooncake: the entry of {key} is unreadable: {error}") from error
        whole = all(client.is_exist(name) == 1 for name, _ in _pieces(entry))
        return entry if whole else None

    def _fetch(self, entry: Entry, path: Path) -> None:
        client = self._connected()
        with path.open("wb", buffering=0) as file:
            for name, size_bytes in _pieces(entry):
                data = memoryview(client.get(name))
                if len(data) != size_bytes:
                    raise TransportError(f"mooncake: {name} has {len(data)} bytes, expected {size_bytes}")
                while len(data):
                    data = data[file.write(data) or 0 :]

    def _push(self, entry: Entry, path: Path) -> None:
        client = self._connected()
        with path.open("rb", buffering=0) as file:
            for name, size_bytes in _pieces(entry):
                self._put(name, file.read(size_bytes))
        text = json.dumps({"digest": entry.digest, "size_bytes": entry.size_bytes}).encode()
        self._put(_entry_name(entry.key), text)
        values = json.loads(client.get(_entry_name(entry.key)) or b"{}")
        if not values:
            raise TransportError(f"mooncake: the entry of {entry.key} is gone at once: no holder has room")
        known = Entry(key=entry.key, digest=values["digest"], size_bytes=values["size_bytes"])
        require_same(known, entry, "mooncake")

    def _put(self, name: str, data: bytes) -> None:
        code = self._connected().put(name, data)
        if code != 0:
            raise TransportError(f"mooncake: put of {name} gave code {code}, expected 0")

    def _drop(self, key: Key) -> None:
        client = self._connected()
        entry = self._entry(key)
        client.remove(_entry_name(key), True)  # codes: what is gone already is fine
        for name, _ in _pieces(entry) if entry is not None else []:
            client.remove(name, True)


def load_library() -> Any:
    """The library's store class.

    Raises: TransportError, saying what is missing.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise TransportError(
            f"mooncake is not usable here: {error}; it needs pip install 'megloom[mooncake]' and the system"
            " library libibverbs (Debian: libibverbs1)"
        ) from error
    return MooncakeDistributedStore


def _entry_name(key: Key) -> str:
    return f"{key}.json"


def _pieces(entry: Entry) -> list[tuple[str, int]]:
    """Names and sizes of the object's pieces; an empty object has none."""
    offsets = range(0, entry.size_bytes, PIECE_BYTES)
    return [
        (f"{object_name(entry)}/{number:06d}", min(PIECE_BYTES, entry.size_bytes - offset))
        for number, offset in enumerate(offsets)
    ]
