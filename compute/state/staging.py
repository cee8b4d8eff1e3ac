"""Whole folders of weight versions, for whoever loads them: trainers, engines, exports.

`full_folder` gives an anchor as it is, and rebuilds a delta once per node:

    <scratch>/<policy folder's hash>-v000123-<digest>/{model.safetensors, config.json, …, manifest.json, DONE}

The scratch folder lies in memory by default, holds a bounded number of bytes (least recently used go first;
the newest two of a policy stay) and is shared by all processes of the node: one builds, the others wait for
it. What a killed process left there is replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megloom.compute.state.delta import DeltaError, apply_delta
from megloom.compute.state.weights import (
    DELTA_FILE,
    DONE_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    WeightManifest,
    WeightsError,
    complete_versions,
    is_complete,
    read_manifest,
    version_dir,
)

log = logging.getLogger(__name__)
BUDGET_BYTES = 8 << 30  # of a node's scratch folder; a version of 135M weights in float32 takes 0.5 GiB
KEEP_PER_POLICY = 2  # what is served, and what is about to be
SCRATCH_VARIABLE = "MEGLOOM_SCRATCH"


class CorruptVersion(WeightsError):
    """A version that cannot be rebuilt. `newest_intact` is the newest intact anchor at or below it."""

    def __init__(self, message: str, newest_intact: int | None) -> None:
        super().__init__(message)
        self.newest_intact = newest_intact


@dataclass(frozen=True, kw_only=True, slots=True)
class UsableVersion:
    """Weights to load. If `damage` is not None they are an older anchor's, not those that were asked for."""

    folder: Path
    manifest: WeightManifest
    damage: str | None = None


def default_scratch() -> Path:
    """This user's scratch folder: $MEGLOOM_SCRATCH, else in memory, else among temporary files."""
    if chosen := os.environ.get(SCRATCH_VARIABLE):
        return Path(chosen)
    memory = Path("/dev/shm")
    root = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"megloom-weights-{os.getuid()}"


def full_folder(
    folder: Path,
    scratch: Path | None = None,
    *,
    verified: bool = True,
    budget_bytes: int = BUDGET_BYTES,
) -> Path:
    """A whole `save_pretrained` folder of a version: itself if it is one, else rebuilt in scratch.

    `verified` checks an anchor's digest too. Blocks; any number of processes may call it at once.
    Raises: CorruptVersion, naming what was found and the newest anchor to fall back to; FileNotFoundError if
    there is no complete version.
    """
    manifest = _intact(folder, verified=verified)
    if manifest.is_whole:
        return folder
    with _place(folder, manifest, scratch) as target:
        if not is_complete(target):
            _rebuild(folder, manifest, target)
        os.utime(target / DONE_FILE)  # used now
    _evict(target, budget_bytes)
    return target


def usable_folder(folder: Path, scratch: Path | None = None) -> UsableVersion:
    """`full_folder`, or the newest intact anchor at or below a version that is damaged, with a warning.

    For whoever holds the version's weights elsewhere, or can live with older ones and says so.
    Raises: CorruptVersion if no anchor is intact either.
    """
    try:
        return UsableVersion(
            folder=full_folder(folder, scratch), manifest=read_manifest(folder, verified=False)
        )
    except CorruptVersion as error:
        if error.newest_intact is None:
            raise
        anchor = version_dir(folder.parent, error.newest_intact)
        log.error("%s; falling back to version %d", error, error.newest_intact)
        return UsableVersion(folder=anchor, manifest=read_manifest(anchor, verified=False), damage=str(error))


def newest_intact_anchor(folder: Path, version: int) -> int | None:
    """The newest anchor in a policy's folder at or below `version` whose digest is right."""
    for number in reversed([found for found in complete_versions(folder) if found <= version]):
        try:
            if read_manifest(version_dir(folder, number), verified=False).is_whole:
                read_manifest(version_dir(folder, number))
                return number
        except (WeightsError, FileNotFoundError):
            continue
    return None


def stage_whole(folder: Path, manifest: WeightManifest, source: Path, scratch: Path | None = None) -> Path:
    """Moves a version's whole weights, which its writer still has in `source`, into scratch.

    `put_version` calls it as `stage`: after it nobody on this node rebuilds the version at `folder`.
    """
    with _place(folder, manifest, scratch) as target:
        if not is_complete(target):
            with _building(source, manifest, target) as staging:
                shutil.move(source / MODEL_FILE, staging / MODEL_FILE)
    _evict(target, BUDGET_BYTES)
    return target


def _intact(folder: Path, *, verified: bool) -> WeightManifest:
    try:
        return read_manifest(folder, verified=verified)
    except WeightsError as error:
        raise _corrupt(folder, str(error)) from error


def _rebuild(folder: Path, manifest: WeightManifest, target: Path) -> None:
    assert manifest.base_version is not None
    base = version_dir(folder.parent, manifest.base_version)
    try:
        if not is_complete(base):
            raise DeltaError(f"its base {base} is not there")
        with _building(folder, manifest, target) as staging:
            apply_delta(base / MODEL_FILE, folder / manifest.weights_file, staging / MODEL_FILE)
    except (DeltaError, FileNotFoundError) as error:
        raise _corrupt(folder, str(error)) from error


def _corrupt(folder: Path, found: str) -> CorruptVersion:
    digits = folder.name.removeprefix("v")
    intact = newest_intact_anchor(folder.parent, int(digits)) if digits.isdecimal() else None
    remedy = f"newest intact anchor: version {intact}" if intact is not None else "no anchor is intact"
    return CorruptVersion(f"{folder} cannot be rebuilt: {found} ({remedy})", intact)


@contextmanager
def _building(source: Path, manifest: WeightManifest, target: Path) -> Iterator[Path]:
    """A folder that becomes `target`, whole or not at all, once the caller has put the weights into it.

    Files that are not weights are copied from `source`.
    """
    staging = target.with_name(f".{target.name}.tmp")  # its name is free: the caller holds the lock
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o700)
    try:
        yield staging
        for path in source.iterdir():
            if path.is_dir():  # an adapter
                shutil.copytree(path, staging / path.name)
            elif path.name not in (MODEL_FILE, DELTA_FILE, MANIFEST_FILE, DONE_FILE):
                shutil.copy(path, staging / path.name)
        whole = replace(manifest, base_version=None, base_digest=None, stored_bytes=manifest.size_bytes)
        (staging / MANIFEST_FILE).write_text(json.dumps(asdict(whole), indent=1))
        (staging / DONE_FILE).write_text(manifest.digest)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _place(folder: Path, manifest: WeightManifest, scratch: Path | None) -> Iterator[Path]:
    """Where a version's whole copy lies in scratch; meanwhile nobody else on this node builds one.

    Raises: WeightsError if the scratch folder is another user's.
    """
    root = scratch or default_scratch()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if root.stat().st_uid != os.getuid():
        raise WeightsError(f"scratch folder {root} belongs to another user; set ${SCRATCH_VARIABLE}")
    policy = hashlib.blake2b(str(folder.parent.resolve()).encode(), digest_size=6).hexdigest()
    with _locked(root / f".{policy}.lock"):
        yield root / f"{policy}-v{manifest.version:06d}-{manifest.digest[:16]}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; the kernel lets go of a dead one's."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _evict(keep: Path, budget_bytes: int) -> None:
    """Deletes the least recently used folders beyond the budget, never the newest few of a policy."""
    with _locked(keep.parent / ".evict.lock"):
        newest_first = sorted(_staged(keep.parent), reverse=True)
        total = sum(size for _, size, _ in newest_first)
        num_of: dict[str, int] = {}
        spared = {keep}
        for _, _, path in newest_first:
            policy = path.name.partition("-")[0]
            num_of[policy] = num_of.get(policy, 0) + 1
            if num_of[policy] <= KEEP_PER_POLICY:
                spared.add(path)
        for _, size, path in reversed(newest_first):
            if total > budget_bytes and path not in spared:
                (path / DONE_FILE).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                total -= size


def _staged(scratch: Path) -> Iterator[tuple[float, int, Path]]:
    """The complete folders: when last used, size in bytes, path."""
    for done in scratch.glob(f"*/{DONE_FILE}"):
        with suppress(FileNotFoundError):  # it is going
            size_bytes = sum(path.stat().st_size for path in done.parent.rglob("*"))
            yield done.stat().st_mtime, size_bytes, done.parent
