"""The state store of one node: put and get whole files by logical key, wherever their bytes are.

Promises. A put is all or nothing, also if the process is killed. An object never changes: a put of the same
content is a no-op, of other content an error. `get` returns a local file that can be mapped and whose digest
was compared, by this process, at least once; later by size, time and inode. Bad copies are dropped with their
cause in the log, and the next one is tried. Time, ids and blocking work are injected.
Called by training groups; trainers themselves only write and map the files.
Source: FlexMARL's Set/Get API (3.4), with files in place of device objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from megloom.compute.state.digests import file_digest
from megloom.compute.state.drafts import Drafts, Surroundings, entry_of
from megloom.compute.state.errors import NoValidCopy, TransportError
from megloom.compute.state.index import Entry
from megloom.compute.state.keys import Key
from megloom.compute.state.node_files import Draft, LocalCopy, NodeFiles
from megloom.compute.state.path_choice import Hardware, Place, Plan, ranked
from megloom.compute.state.sources import DeviceCopy, Export, Source, Sources, name_of
from megloom.compute.state.tiers import Tier, TierPlan
from megloom.compute.state.transports.folder import FolderTransport, require_same
from megloom.compute.state.transports.protocol import Transport

log = logging.getLogger(__name__)

LEASE_S = 60.0  # long enough to start a trainer that maps the file
_OPEN_TRIES = 3  # between a pull and its open another put may demote the copy


class StateStore:
    """Made by `open`."""

    def __init__(self, node: str, files: NodeFiles, sources: Sources, around: Surroundings) -> None:
        self.node = node
        self._files, self._sources, self._around = files, sources, around
        self._drafts = Drafts(files, around)
        self._pulls: dict[Key, asyncio.Task[None]] = {}
        self._devices: dict[Key, dict[Place, DeviceCopy]] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        node: str,
        tiers: Sequence[TierPlan],
        index_path: Path,
        around: Surroundings,
        *,
        peers: Mapping[str, Transport] | None = None,
        hardware: Hardware | None = None,
    ) -> AsyncIterator[Self]:
        """Opens or creates the store of `node`. `peers` (by node name) are closed with it.

        Raises: StateError if another process has this node's store open.
        """
        files = await around.offload.run(NodeFiles, index_path, tiers)
        remote = [FolderTransport(plan.root, around.bulk) for plan in tiers if plan.tier == Tier.REMOTE]
        sources = Sources(node, peers or {}, remote[0] if remote else None, hardware or Hardware())
        store = cls(node, files, sources, around)
        try:
            yield store
        finally:
            for task in list(store._pulls.values()):
                task.cancel()
            await asyncio.gather(*store._pulls.values(), return_exceptions=True)
            await sources.close()
            await around.offload.run(files.close)

    async def put(self, key: Key, source: Path | bytes | Draft, *, digest: str | None = None) -> Entry:
        """Stores a file (copied), bytes, or a draft (moved; gone in any case), on the fastest tier with room.

        `digest` is `file_digest` of a draft, if its writer has it. The key's host is this node from now on.
        Raises: ConflictingState if the key has other content; StateFull; FileNotFoundError for no file.
        """
        if isinstance(source, Draft):
            try:
                return await self._commit(key, source, digest)
            finally:
                await self.discard(source)
        known = await self.local_entry(key)
        if known is not None:  # nothing is written, so nothing needs room
            offered = await self._around.bulk.run(entry_of, key, source)
            require_same(known, offered, f"node {self.node}")
            await self.note_node(key.run, key.policy, self.node)
            return known
        async with self._drafts.copied(source) as draft:
            return await self._commit(key, draft, None)

    async def draft(self, size_bytes: int, *, below: Tier | None = None) -> Draft:
        """A path for another process to write a state of about `size_bytes` to; then `put` or `discard` it.

        If its disk turns out to be full, ask again `below` its tier.
        Raises: StateFull.
        """
        around = self._around
        return await around.offload.run(
            self._files.reserve, around.new_id(), size_bytes, below, around.clock()
        )

    async def discard(self, draft: Draft) -> None:
        """Removes a draft that will not be put; one that was put is fine."""
        await self._around.offload.run(self._files.discard, draft.draft_id)

    async def get(self, key: Key, *, holder: str | None = None, lease_s: float = LEASE_S) -> Path:
        """The local file, pulled once from elsewhere if need be; leased to `holder` if one is given.

        Without a lease or pin a later put may move the file away; a mapping of it stays valid.
        Raises: FileNotFoundError if no node knows the key; NoValidCopy; ConflictingState; StateFull.
        """
        around, reader_id = self._around, self._around.new_id()
        try:
            for _ in range(_OPEN_TRIES):
                copy = await self._open_local(reader_id, key)
                if copy is not None:
                    if holder is not None:
                        await self.lease(key, holder, lease_s)
                    await around.offload.run(self._files.index.note_host, key.run, key.policy, self.node)
                    return copy.path
                await self._pull_once(key)
            raise NoValidCopy(f"state {key}: pulled {_OPEN_TRIES} times, and moved away each time")
        finally:
            await around.offload.run(self._files.close_reader, reader_id)

    @asynccontextmanager
    async def reading(self, key: Key) -> AsyncIterator[LocalCopy]:
        """A file of this node, which stays where it is while the block runs. Nothing is pulled.

        Raises: FileNotFoundError if this node has no file of the key.
        """
        reader_id = self._around.new_id()
        try:
            copy = await self._open_local(reader_id, key)
            if copy is None:
                raise FileNotFoundError(f"no state {key} in the files of node {self.node}")
            yield copy
        finally:
            await self._around.offload.run(self._files.close_reader, reader_id)

    async def local_entry(self, key: Key) -> Entry | None:
        """The object's entry if this node has a file of it, None if not."""
        return await self._around.offload.run(self._files.local_entry, key)

    async def entry(self, key: Key) -> Entry | None:
        """What this node knows of the key, None if nothing; copies may be elsewhere."""
        return await self._around.offload.run(self._files.index.entry, key)

    async def keys(self, *, run: str | None = None, policy: str | None = None) -> list[Key]:
        """The keys that this node knows, in order."""
        entries = await self._around.offload.run(self._files.index.entries)
        keys = [entry.key for entry in entries]
        return [key for key in keys if run in (None, key.run) and policy in (None, key.policy)]

    async def delete(self, key: Key) -> bool:
        """Deletes the object on this node and its URL; whether there was one. Mappings of it stay valid.

        Raises: StateError if it is pinned, leased or being read, naming the holders.
        """
        return await self._around.offload.run(self._files.delete, key, self._around.clock())

    async def pin(self, key: Key, holder: str = "pinned") -> None:
        """Keeps the object's copies where they are until `unpin`, across restarts too.

        Raises: FileNotFoundError if this node does not know the key.
        """
        await self._around.offload.run(self._files.keep, key, holder, None)

    async def unpin(self, key: Key, holder: str = "pinned") -> None:
        await self._around.offload.run(self._files.index.unpin, key, holder)

    async def lease(self, key: Key, holder: str, seconds: float = LEASE_S) -> float:
        """Like `pin`, until the returned time; a second lease of a holder replaces its first."""
        expires_s = self._around.clock() + seconds
        await self._around.offload.run(self._files.keep, key, holder, expires_s)
        return expires_s

    async def release(self, key: Key, holder: str) -> None:
        await self._around.offload.run(self._files.index.release, key, holder)

    async def secure(self, key: Key) -> None:
        """Makes sure of a copy below memory, which outlives a restart of the machine.

        Raises: FileNotFoundError without a file here; StateFull.
        """
        async with self.reading(key) as copy:
            await self._around.offload.run(self._files.copy_down, copy, self._around.clock())

    async def share(self, key: Key, peer: str) -> None:
        """Gives the object to a peer; to one that is a cache only after `secure`.

        Raises: FileNotFoundError without a file here; ConflictingState; StateFull; TransportError.
        """
        transport = self._sources.peers[peer]
        if transport.is_cache:
            await self.secure(key)
        async with self.reading(key) as copy:
            await transport.push(copy.entry, copy.path)

    async def last_node(self, policy: str, *, run: str | None = None) -> str | None:
        """The node that last put or got a state of the policy: where its next trainer starts fastest."""
        return await self._around.offload.run(self._files.index.last_host, policy, run)

    async def note_node(self, run: str, policy: str, node: str) -> None:
        """Says that `node` hosts the policy now."""
        await self._around.offload.run(self._files.index.note_host, run, policy, node)

    async def held_bytes(self) -> dict[Tier, int]:
        """Bytes per tier, drafts included."""
        return await self._around.offload.run(self._files.held_bytes)

    def announce(self, key: Key, place: Place, size_bytes: int, export: Export) -> None:
        """A trainer of this node holds the state in its memory; `get` may ask it to `export`."""
        self._devices.setdefault(key, {})[place] = DeviceCopy(
            place=place, size_bytes=size_bytes, export=export
        )

    def withdraw(self, key: Key, place: Place) -> None:
        """The trainer does not hold it any more."""
        self._devices.get(key, {}).pop(place, None)

    async def where(self, key: Key) -> list[Place]:
        """Where the state is known to be, other nodes asked; those that do not answer are left out."""
        copies = await self._around.offload.run(self._files.index.copies, key)
        here = [Place(node="" if copy.tier == Tier.REMOTE else self.node, tier=copy.tier) for copy in copies]
        known = await self.entry(key)
        found = await self._sources.find(key, known)
        return sorted({*here, *self._devices.get(key, {}), *(source.place for source in found.sources)})

    async def plan(self, key: Key, wanted: Place) -> list[Plan]:
        """The ways to `wanted`, the cheapest first; device steps are the training backend's to do.

        Raises: FileNotFoundError if nothing is known of the key.
        """
        places = await self.where(key)
        if not places:
            raise FileNotFoundError(f"no state {key}")
        known = await self.entry(key)
        sizes = [copy.size_bytes for copy in self._devices.get(key, {}).values()]
        size_bytes = known.size_bytes if known else max(sizes, default=0)
        return ranked(places, wanted, size_bytes, self._sources.hardware)

    async def _open_local(self, reader_id: str, key: Key) -> LocalCopy | None:
        around = self._around
        for copy in await around.offload.run(self._files.open_copies, reader_id, key):
            if copy.is_trusted or await self._is_right(copy):
                return copy
        return None

    async def _is_right(self, copy: LocalCopy) -> bool:
        try:
            got = await self._around.bulk.run(file_digest, copy.path)
            cause = f"digest {got}, expected {copy.entry.digest}" if got != copy.entry.digest else None
        except OSError as error:
            cause = f"unreadable: {error}"
        if cause is None:
            await self._around.offload.run(self._files.trust, copy)
            return True
        await self._around.offload.run(self._files.drop_copy, copy.entry.key, copy.tier, cause)
        return False

    async def _pull_once(self, key: Key) -> None:
        task = self._pulls.get(key)
        if task is None:
            task = asyncio.create_task(self._pull(key), name=f"pull {key}")
            self._pulls[key] = task
            task.add_done_callback(lambda done: self._pulled(key, done))
        await asyncio.shield(task)  # another waiter may still want what a cancelled one began

    def _pulled(self, key: Key, task: asyncio.Task[None]) -> None:
        del self._pulls[key]
        if not task.cancelled():
            task.exception()  # its waiters have it, or there are none any more

    async def _pull(self, key: Key) -> None:
        device = next(iter(self._devices.get(key, {}).values()), None)
        if device is not None:
            async with self._drafts.filled(device.size_bytes, device.export) as draft:
                await self._commit(key, draft, None)
            return
        known = await self.entry(key)
        found = await self._sources.find(key, known)
        causes = found.causes
        for source in found.sources:
            try:
                await self._fetch(source)
                return
            except TransportError as error:
                log.error("key=%s source=%s: not fetched: %s", key, name_of(source.place), error)
                causes.append(str(error))
        if known is None and not causes:
            raise FileNotFoundError(f"no state {key} on node {self.node} or those that it asks")
        raise NoValidCopy(
            f"state {key}: no valid copy: {'; '.join(causes) or 'all were dropped, see the log'}"
        )

    async def _fetch(self, source: Source) -> None:
        entry = source.entry

        async def fill(path: Path) -> None:
            await source.transport.fetch(entry, path)

        async with self._drafts.filled(entry.size_bytes, fill) as draft:
            got = await self._around.bulk.run(file_digest, draft.path)
            if got != entry.digest:
                raise TransportError(f"{name_of(source.place)} sent digest {got}, expected {entry.digest}")
            await self._commit(entry.key, draft, got)

    async def _commit(self, key: Key, draft: Draft, digest: str | None) -> Entry:
        around = self._around
        size_bytes = (await around.bulk.run(draft.path.stat)).st_size
        if digest is None:
            digest = await around.bulk.run(file_digest, draft.path)
        entry = Entry(key=key, digest=digest, size_bytes=size_bytes)
        await around.offload.run(self._files.commit, draft, entry, around.clock())
        await around.offload.run(self._files.index.note_host, key.run, key.policy, self.node)
        return entry
