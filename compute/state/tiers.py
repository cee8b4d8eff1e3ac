"""The places of one node, from the fastest down, and how much of each the store may fill."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megloom.compute.state.errors import StateError


class Tier(StrEnum):
    """From the fastest down. The store keeps files in the last three; the first two are trainers' memory."""

    DEVICE = "device"
    PINNED = "pinned"
    TMPFS = "tmpfs"
    DISK = "disk"
    REMOTE = "remote"


ORDER = tuple(Tier)
FILE_TIERS = (Tier.TMPFS, Tier.DISK)
_SHM = Path("/dev/shm")
_SMALLEST_TMPFS_BYTES = 256 << 20  # containers often give 64 MiB, too little for any state


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPlan:
    """`root` is a folder, for REMOTE an fsspec URL. `budget_bytes` None means as much as fits.

    Raises: ValueError for a tier that holds no files, or a budget below 0.
    """

    tier: Tier
    root: str
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.tier not in (*FILE_TIERS, Tier.REMOTE):
            raise ValueError(f"tier {self.tier} of {self.root}: the store keeps no files there")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ValueError(
                f"tier {self.tier} of {self.root}: budget_bytes {self.budget_bytes}, expected >= 0"
            )


def local_tiers(
    home: Path,
    *,
    tmpfs_budget_bytes: int | None = None,
    disk_budget_bytes: int | None = None,
    remote_url: str | None = None,
    shm: Path = _SHM,
) -> tuple[TierPlan, ...]:
    """The tiers of a home: memory (`shm`), by default half of what is free there; its disk; a URL if given.

    Without a usable tmpfs the disk comes first. The folder in `shm` belongs to this user and this home.
    Raises: StateError if another user made that folder.
    """
    plans = []
    free_bytes = shutil.disk_usage(shm).free if shm.is_dir() and os.access(shm, os.W_OK) else 0
    budget = free_bytes // 2 if tmpfs_budget_bytes is None else tmpfs_budget_bytes
    if free_bytes >= _SMALLEST_TMPFS_BYTES and budget > 0:
        name = hashlib.blake2b(str(home.resolve()).encode(), digest_size=6).hexdigest()
        folder = shm / f"megloom-{os.getuid()}-{name}"
        own_folder(folder)
        plans.append(TierPlan(tier=Tier.TMPFS, root=str(folder), budget_bytes=budget))
    plans.append(TierPlan(tier=Tier.DISK, root=str(home / "state"), budget_bytes=disk_budget_bytes))
    if remote_url is not None:
        plans.append(TierPlan(tier=Tier.REMOTE, root=remote_url))
    return tuple(plans)


def own_folder(folder: Path) -> None:
    """Makes a folder that only this user can enter; one that is there must be such a folder.

    Raises: StateError if it is a link or another user's: its files would not be safe there.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if folder.is_symlink() or facts.st_uid != os.getuid():
        raise StateError(f"{folder}: a link or another user's folder, expected one of user {os.getuid()}")
    if facts.st_mode & 0o077:
        folder.chmod(0o700)
