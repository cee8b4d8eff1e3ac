"""What a policy's folder holds: its versions, which are pinned, and which may go.

    <policy's folder>/{v000123/, v000124/, …, v000123.pin}

A pin is a file of its own beside the version, so that two that set or lift pins never overwrite each other.
Pruning keeps the newest versions, pinned and committed ones, and every anchor that a kept delta needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megloom.compute.state.durable import replace_file
from megloom.compute.state.weights import (
    WeightManifest,
    WeightsError,
    complete_versions,
    delete_version,
    is_complete,
    read_manifest,
    version_dir,
)

PIN_SUFFIX = ".pin"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredVersion:
    """A complete version in a folder. `damage` says what is wrong with its manifest, which then is None."""

    version: int
    manifest: WeightManifest | None
    is_pinned: bool
    damage: str | None = None


def list_versions(folder: Path) -> list[StoredVersion]:
    """All complete versions of a policy, in order. Their weights are not read."""
    kept = pinned(folder)
    found = []
    for version in complete_versions(folder):
        manifest, damage = None, None
        try:
            manifest = read_manifest(version_dir(folder, version), verified=False)
        except WeightsError as error:
            damage = str(error)
        found.append(
            StoredVersion(version=version, manifest=manifest, is_pinned=version in kept, damage=damage)
        )
    return found


def pin(folder: Path, version: int) -> None:
    """Keeps a version, and its trainer state as long as that is there, from being pruned.

    Raises: FileNotFoundError if there is no such version.
    """
    if not is_complete(version_dir(folder, version)):
        raise FileNotFoundError(f"no complete weight version at {version_dir(folder, version)}")
    replace_file(_pin_file(folder, version), lambda path: path.touch())


def unpin(folder: Path, version: int) -> bool:
    """Lifts a pin; False if there was none."""
    path = _pin_file(folder, version)
    was_pinned = path.exists()
    path.unlink(missing_ok=True)
    return was_pinned


def pinned(folder: Path) -> frozenset[int]:
    """The pinned versions of a policy."""
    names = (path.name for path in folder.glob(f"v*{PIN_SUFFIX}"))
    numbers = (name.removesuffix(PIN_SUFFIX).removeprefix("v") for name in names)
    return frozenset(int(number) for number in numbers if number.isdecimal())


def prunable(folder: Path, *, keep: int, needed: Iterable[int]) -> list[int]:
    """The versions that may go: not among the newest `keep`, not pinned, not `needed`, no kept one's base.

    A version whose manifest cannot be read stays: someone should look at it.
    """
    stored = list_versions(folder)
    staying = {one.version for one in stored[-keep:]} | set(needed)
    staying |= {one.version for one in stored if one.is_pinned or one.manifest is None}
    for one in stored:
        if one.version in staying and one.manifest is not None and one.manifest.base_version is not None:
            staying.add(one.manifest.base_version)
    return [one.version for one in stored if one.version not in staying]


def prune(folder: Path, *, keep: int, needed: Iterable[int]) -> list[int]:
    """Deletes what `prunable` names, deltas before anchors, and returns their numbers.

    Killed in between, what is left can be rebuilt all the same.
    """
    doomed = prunable(folder, keep=keep, needed=needed)
    for version in reversed(doomed):  # a delta's base has a lower number
        delete_version(folder, version)
    return doomed


def _pin_file(folder: Path, version: int) -> Path:
    return folder / f"{version_dir(folder, version).name}{PIN_SUFFIX}"
