"""The policies' version folders as the conductor sees them: what is pinned, what may go, what is intact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from megloom.compute.state.staging import full_folder, newest_intact_anchor
from megloom.compute.state.versions import pinned, prune
from megloom.compute.state.weights import (
    WeightManifest,
    WeightsError,
    complete_versions,
    is_complete,
    read_manifest,
    version_dir,
)
from megloom.compute.store.offload import Offload
from megloom.compute.trainers.protocol import Published


class UnknownVersion(Exception):
    """A policy has no such version on the disk, or it cannot be rebuilt. The message says what there is."""


class VersionKeeper(Protocol):
    """What a session asks of the folders."""

    async def pinned(self, policies: Iterable[str]) -> dict[str, frozenset[int]]:
        """The pinned versions of each policy."""
        ...

    async def prune(self, policy: str, *, keep: int, needed: Sequence[int]) -> list[int]:
        """Deletes what neither the newest `keep`, a `needed` nor a pinned version needs; what it was."""
        ...

    async def find(self, policy: str, version: int) -> tuple[Published, int | None]:
        """A version that can be loaded, and its parent's number.

        Raises: UnknownVersion.
        """
        ...


class FileKeeper:
    """`weights` gives a policy's folder."""

    def __init__(self, weights: Callable[[str], str], offload: Offload) -> None:
        self._weights, self._offload = weights, offload

    async def pinned(self, policies: Iterable[str]) -> dict[str, frozenset[int]]:
        return {policy: await self._offload.run(pinned, Path(self._weights(policy))) for policy in policies}

    async def prune(self, policy: str, *, keep: int, needed: Sequence[int]) -> list[int]:
        folder = Path(self._weights(policy))
        return await self._offload.run(partial(prune, folder, keep=keep, needed=needed))

    async def find(self, policy: str, version: int) -> tuple[Published, int | None]:
        folder = Path(self._weights(policy))
        manifest = await self._offload.run(find_version, folder, policy, version)
        published = Published(
            uri=str(version_dir(folder, version)),
            version=version,
            digest=manifest.digest,
            size_bytes=manifest.size_bytes,
        )
        return published, manifest.parent_version


def find_version(folder: Path, policy: str, version: int) -> WeightManifest:
    """The manifest of a version, once its weights are known to be intact.

    Raises: UnknownVersion, naming the nearest that there is.
    """
    path = version_dir(folder, version) if version >= 0 else folder
    if not is_complete(path):
        known = complete_versions(folder)
        nearest = min(known, key=lambda number: abs(number - version), default=None)
        there = "it has none" if nearest is None else f"nearest: {nearest}; it has {len(known)}"
        raise UnknownVersion(f"policy {policy} has no version {version} on the disk ({there})")
    try:
        full_folder(path)
        return read_manifest(path, verified=False)
    except WeightsError as error:
        intact = newest_intact_anchor(folder, version)
        remedy = "" if intact is None else f"; version {intact} is intact"
        raise UnknownVersion(f"policy {policy}: version {version} cannot be used: {error}{remedy}") from error
