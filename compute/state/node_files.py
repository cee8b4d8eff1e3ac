"""The files of one node's tiers and their rows: room, commits, demotion, drops. Synchronous, on one thread.

A file is written as a draft, moved to its place in one rename, and then gets its row; a row goes before its
file. So a kill at any point leaves a whole object or none, and `sweep` removes what has no row.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megloom.compute.state.demotion import Held, Move, Room, make_room
from megloom.compute.state.durable import sync
from megloom.compute.state.errors import (
    DISK_FULL,
    ConflictingState,
    StateError,
    StateFull,
    TransportError,
)
from megloom.compute.state.index import CopyRow, Entry, Index
from megloom.compute.state.keys import Key
from megloom.compute.state.tiers import FILE_TIERS, ORDER, Tier, TierPlan, own_folder
from megloom.compute.state.transports.folder import SharedFolder, object_name, require_same

log = logging.getLogger(__name__)

DRAFTS = ".drafts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A file in the making, on the tier that has room for `size_bytes`. Fill `path`, then put it."""

    draft_id: str
    tier: Tier
    path: Path
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCopy:
    """A file that `stat` says is unchanged. Not `is_trusted`: its digest must be compared first."""

    entry: Entry
    tier: Tier
    path: Path
    is_trusted: bool


@dataclass(kw_only=True, slots=True)
class _Session:
    """What lasts as long as this process: written by `NodeFiles` only."""

    drafts: dict[str, Draft] = field(default_factory=dict)
    readers: dict[str, Key] = field(default_factory=dict)  # a reader keeps its object where it is
    trusted: set[tuple[Key, Tier]] = field(default_factory=set)  # copies whose digest this process has seen


class NodeFiles:
    """`plans` from the fastest tier down. `now_s` parameters are wall time: leases outlive a process.

    Raises: ValueError for plans out of order; StateError if another process has the index open.
    """

    def __init__(self, index_path: Path, plans: Sequence[TierPlan]) -> None:
        tiers = [plan.tier for plan in plans]
        if not tiers or tiers != sorted(set(tiers), key=ORDER.index) or tiers[0] not in FILE_TIERS:
            raise ValueError(
                f"state tiers {tiers}, expected some of {list(ORDER[2:])} in this order, files first"
            )
        self.index = Index(index_path)
        self._budgets: Mapping[Tier, int | None] = {plan.tier: plan.budget_bytes for plan in plans}
        self._roots = {plan.tier: Path(plan.root) for plan in plans if plan.tier in FILE_TIERS}
        self._session = _Session()
        try:
            remote = [SharedFolder(plan.root) for plan in plans if plan.tier == Tier.REMOTE]
            self.remote = remote[0] if remote else None
            for root in self._roots.values():
                own_folder(root)
            self.sweep()
        except BaseException:
            self.index.close()
            raise

    def sweep(self) -> None:
        """Makes rows and files agree: drafts and files without a row go, and so do rows without a file."""
        known: dict[Tier, set[Path]] = {tier: set() for tier in self._roots}
        for copy in self.index.copies():
            if copy.tier not in self._budgets:
                log.warning(
                    "key=%s tier=%s: copy forgotten, this node has no such tier now", copy.key, copy.tier
                )
                self.index.move(copy.key, copy.tier, None)
            elif copy.tier in self._roots and self._check(copy, Path(copy.name)):
                known[copy.tier].add(self._roots[copy.tier] / copy.name)
        for tier, root in self._roots.items():
            shutil.rmtree(root / DRAFTS, ignore_errors=True)
            (root / DRAFTS).mkdir(mode=0o700)
            for path in root.glob("*/*/*/v*"):
                if path not in known[tier]:
                    path.unlink()

    def close(self) -> None:
        self.index.close()

    def reserve(self, draft_id: str, size_bytes: int, below: Tier | None, now_s: float) -> Draft:
        """A draft on the fastest tier, slower than `below`, that has room after demoting what is not kept.

        Raises: StateFull if no tier has, naming each with its reason.
        """
        causes = []
        for tier in list(self._roots):
            if below is not None and ORDER.index(tier) <= ORDER.index(below):
                continue
            try:
                self._demote(tier, size_bytes, now_s)
            except StateFull as error:
                log.warning("tier=%s: passed over: %s", tier, error)
                causes.append(str(error))
                continue
            path = self._roots[tier] / DRAFTS / draft_id
            draft = Draft(draft_id=draft_id, tier=tier, path=path, size_bytes=size_bytes)
            self._session.drafts[draft_id] = draft
            return draft
        raise StateFull(f"no room for {size_bytes} bytes: {'; '.join(causes) or f'no tier below {below}'}")

    def discard(self, draft_id: str) -> None:
        """Removes a draft and gives its room back; one that was put or discarded is fine."""
        draft = self._session.drafts.pop(draft_id, None)
        if draft is not None:
            draft.path.unlink(missing_ok=True)

    def commit(self, draft: Draft, entry: Entry, now_s: float) -> None:
        """Makes the draft the object's copy; if the same content is there already the draft goes.

        A draft that grew beyond its reservation needs room anew.
        Raises: ConflictingState if the key has other content; StateFull. The draft is gone in any case.
        """
        try:
            known = self.index.entry(entry.key)
            if known is not None:
                require_same(known, entry, str(self.index.path))
                if self._files_of(entry.key):
                    self.index.touch(entry.key)
                    return
            if entry.size_bytes > draft.size_bytes:
                self._demote(draft.tier, entry.size_bytes - draft.size_bytes, now_s)
            copy = self._settle(entry, draft.tier, draft.path)
            try:
                self.index.add(entry, copy, now_s)
            except StateError:
                self._remove_file(copy)
                raise
            self._session.trusted.add((entry.key, draft.tier))
        finally:
            self.discard(draft.draft_id)

    def open_copies(self, reader_id: str, key: Key) -> list[LocalCopy]:
        """The object's files on this node, the fastest first; it stays where it is until `close_reader`."""
        entry = self.index.entry(key)
        if entry is None:
            return []
        self._session.readers[reader_id] = key
        self.index.touch(key)
        return [
            LocalCopy(
                entry=entry,
                tier=copy.tier,
                path=self._roots[copy.tier] / copy.name,
                is_trusted=(key, copy.tier) in self._session.trusted,
            )
            for copy in self._files_of(key)
        ]

    def local_entry(self, key: Key) -> Entry | None:
        """The object's entry, None without a file of it on this node."""
        return self.index.entry(key) if self._files_of(key) else None

    def close_reader(self, reader_id: str) -> None:
        self._session.readers.pop(reader_id, None)

    def trust(self, copy: LocalCopy) -> None:
        """The copy's digest was compared and is right."""
        self._session.trusted.add((copy.entry.key, copy.tier))

    def drop_copy(self, key: Key, tier: Tier, cause: str) -> None:
        """Forgets a bad copy, deletes its file, and logs the cause. The object stays known."""
        log.error("key=%s tier=%s: copy dropped: %s", key, tier, cause)
        for copy in self.index.copies(key):
            if copy.tier == tier:
                self._remove(copy)

    def copy_down(self, copy: LocalCopy, now_s: float) -> None:
        """A second copy on the first tier below memory, if there is none on any of them yet.

        Raises: StateFull, also if this node has no such tier.
        """
        entry = copy.entry
        below = [tier for tier in self._budgets if tier != Tier.TMPFS]
        if any(row.tier in below for row in self.index.copies(entry.key)):
            return
        if not below:
            raise StateFull(f"state {entry.key}: this node has no tier below memory")
        self._demote(below[0], entry.size_bytes, now_s)
        self.index.add(entry, self._copied(entry, copy.path, below[0]), now_s)

    def keep(self, key: Key, holder: str, expires_s: float | None) -> None:
        """A lease until `expires_s`, or a pin if None.

        Raises: FileNotFoundError if the object is not known.
        """
        if self.index.entry(key) is None:
            raise FileNotFoundError(f"no state {key}")
        if expires_s is None:
            self.index.pin(key, holder)
        else:
            self.index.lease(key, holder, expires_s)

    def delete(self, key: Key, now_s: float) -> bool:
        """Deletes the object with all its copies on this node and its URL; whether there was one.

        Raises: StateError if it is kept, naming the holders; TransportError if the URL does not answer.
        """
        if self.index.entry(key) is None:
            return False
        holders = self.index.keepers(now_s, key).get(key, [])
        if holders or key in self._session.readers.values():
            raise StateError(f"state {key}: not deleted, kept by {', '.join(holders) or 'a reader'}")
        copies = self.index.copies(key)
        if self.remote is not None:
            self.remote.drop(key)  # first: without a row nobody would drop it, and a get would bring it back
        self.index.forget(key)
        for copy in copies:
            if copy.tier in self._roots:
                self._remove_file(copy)
        return True

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes per tier, drafts' reservations included."""
        sizes = {entry.key: entry.size_bytes for entry in self.index.entries()}
        total = dict.fromkeys(self._budgets, 0)
        for copy in self.index.copies():
            total[copy.tier] += sizes[copy.key]
        for draft in self._session.drafts.values():
            total[draft.tier] += draft.size_bytes
        return total

    def _demote(self, tier: Tier, need_bytes: int, now_s: float) -> None:
        sizes = {entry.key: entry.size_bytes for entry in self.index.entries()}
        kept = {*self.index.keepers(now_s), *self._session.readers.values()}
        reserved = dict.fromkeys(self._budgets, 0)
        for draft in self._session.drafts.values():
            reserved[draft.tier] += draft.size_bytes
        held = [
            Held(
                key=copy.key,
                tier=copy.tier,
                size_bytes=sizes[copy.key],
                used=copy.used,
                is_kept=copy.key in kept,
            )
            for copy in self.index.copies()
        ]
        moves = make_room(Room(held=held, budgets=self._budgets, reserved=reserved), tier, need_bytes)
        if moves is None:
            here = [copy for copy in held if copy.tier == tier]
            raise StateFull(
                f"tier {tier}: {need_bytes} bytes wanted, budget {self._budgets[tier]}, held"
                f" {sum(copy.size_bytes for copy in here)} (kept"
                f" {sum(copy.size_bytes for copy in here if copy.is_kept)}), reserved {reserved[tier]}"
            )
        for move in moves:
            self._move(move)

    def _move(self, move: Move) -> None:
        entry = self.index.entry(move.key)
        source = next(copy for copy in self.index.copies(move.key) if copy.tier == move.source)
        assert entry is not None, f"{move.key}: a copy without an object"
        target: CopyRow | None = None
        if move.target is not None:
            target = self._copied(entry, self._roots[move.source] / source.name, move.target)
        self.index.move(move.key, move.source, target)
        self._remove_file(source)

    def _copied(self, entry: Entry, source: Path, tier: Tier) -> CopyRow:
        """A copy of a file in its place on another tier; its digest is compared when it is first read."""
        if tier == Tier.REMOTE:
            assert self.remote is not None, "a tier without its folder"
            try:
                self.remote.push(entry, source)
            except (TransportError, ConflictingState) as error:
                raise StateFull(f"tier {tier}: cannot take {entry.key}: {error}") from error
            return self._row(entry, tier, None)
        draft = self._roots[tier] / DRAFTS / f"demoted-{entry.digest[:16]}"
        try:
            shutil.copyfile(source, draft)
            return self._settle(entry, tier, draft)
        except OSError as error:
            raise full_or(error, tier, entry.key) from error
        finally:
            draft.unlink(missing_ok=True)

    def _settle(self, entry: Entry, tier: Tier, draft: Path) -> CopyRow:
        """Moves a whole draft to its place: durable on a disk, whole in any case."""
        if (got := draft.stat().st_size) != entry.size_bytes:
            raise StateError(f"state {entry.key}: {got} bytes on tier {tier}, expected {entry.size_bytes}")
        place = self._roots[tier] / object_name(entry)
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if tier == Tier.DISK:
                sync(draft)
            draft.replace(place)
            if tier == Tier.DISK:
                sync(place.parent)
        except OSError as error:
            raise full_or(error, tier, entry.key) from error
        return self._row(entry, tier, place)

    def _row(self, entry: Entry, tier: Tier, place: Path | None) -> CopyRow:
        facts = place.stat() if place is not None else None
        return CopyRow(
            key=entry.key,
            tier=tier,
            name=object_name(entry),
            mtime_ns=facts.st_mtime_ns if facts else None,
            inode=facts.st_ino if facts else None,
            used=self.index.next_use(),
        )

    def _files_of(self, key: Key) -> list[CopyRow]:
        """The object's copies in local files that are unchanged; the others are dropped."""
        copies = [copy for copy in self.index.copies(key) if copy.tier in self._roots]
        return sorted(
            (copy for copy in copies if self._check(copy, Path(copy.name))),
            key=lambda copy: ORDER.index(copy.tier),
        )

    def _check(self, copy: CopyRow, name: Path) -> bool:
        entry = self.index.entry(copy.key)
        assert entry is not None, f"{copy.key}: a copy without an object"
        try:
            facts = (self._roots[copy.tier] / name).stat()
        except FileNotFoundError:
            self.drop_copy(copy.key, copy.tier, "its file is gone")
            return False
        if (facts.st_size, facts.st_mtime_ns, facts.st_ino) != (entry.size_bytes, copy.mtime_ns, copy.inode):
            self.drop_copy(
                copy.key,
                copy.tier,
                f"its file was changed: {facts.st_size} bytes, expected {entry.size_bytes}",
            )
            return False
        return True

    def _remove(self, copy: CopyRow) -> None:
        self.index.move(copy.key, copy.tier, None)
        self._remove_file(copy)

    def _remove_file(self, copy: CopyRow) -> None:
        self._session.trusted.discard((copy.key, copy.tier))
        (self._roots[copy.tier] / copy.name).unlink(missing_ok=True)


def full_or(error: OSError, tier: Tier, key: Key) -> StateError:
    """The store's error for what a disk refused: `StateFull` if it is full."""
    if error.errno in DISK_FULL:
        return StateFull(f"tier {tier}: disk full while storing {key}: {error}")
    return StateError(f"tier {tier}: cannot store {key}: {error}")
