"""Weight versions on disk, complete or not at all.

    <policy's folder>/v000123/{model.safetensors | model.delta.zst, config.json, tokenizer files,
                               manifest.json, DONE}

An anchor is a Hugging Face `save_pretrained` layout. Between anchors a version may be a lossless delta of the
last anchor of its line: one apply rebuilds it, and a lost delta costs no other version. Either is written
beside its place, flushed, digested, moved there in one rename, and marked DONE last; a folder without DONE
does not exist for any reader. A complete version never changes, except that a corrupt one may be written
again with the weights that its digest names. One writer per policy. No torch here: the caller writes the
tensors.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megloom.compute.state.delta import DeltaError, read_facts, write_delta
from megloom.compute.state.digests import file_digest
from megloom.compute.state.durable import replace_file, sync
from megloom.compute.state.weight_file import WeightFileError, cast_to_bfloat16, has_dtype
from megloom.compute.workload import Publishing

log = logging.getLogger(__name__)
MODEL_FILE = "model.safetensors"
DELTA_FILE = "model.delta.zst"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
DONE_FILE = "DONE"
SCHEMA_VERSION = 3  # 2 and 1 had other digests; they are refused
DENSE_SHARE = 0.9  # of the whole file: a delta above it saves nothing, the version is kept whole
_VERSION_NAME = re.compile(r"v(\d{6,})")


class WeightsError(Exception):
    """A version is corrupt, or would be overwritten with other content. The message names the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """What a version folder says of itself.

    `digest` is BLAKE3 (hex) of the whole model.safetensors and `size_bytes` its length, also where only a
    delta of `base_version` (digest `base_digest`) is kept; `stored_bytes` is what the folder holds of it.
    `parent_version` is the version that it was trained from.
    """

    policy: str
    version: int
    parent_version: int | None
    digest: str
    size_bytes: int
    stored_bytes: int
    base_version: int | None = None
    base_digest: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def is_whole(self) -> bool:
        return self.base_version is None

    @property
    def weights_file(self) -> str:
        return MODEL_FILE if self.is_whole else DELTA_FILE


def version_dir(folder: Path, version: int) -> Path:
    """Where a version lies under its policy's folder; it need not exist.

    Raises: ValueError if `version` is negative.
    """
    if version < 0:
        raise ValueError(f"{folder}: version {version}, expected 0 or more")
    return folder / f"v{version:06d}"


def put_version(
    folder: Path,
    version: int,
    *,
    policy: str,
    parent_version: int | None,
    write: Callable[[Path], None],
    publishing: Publishing | None = None,
    stage: Callable[[Path, WeightManifest, Path], object] | None = None,
) -> WeightManifest:
    """Publishes the files that `write(directory)` makes, which must include a whole model.safetensors.

    float32 tensors are cast if `publishing` says bfloat16. Whether the version is kept whole or as a delta is
    `publishing`'s too (default: whole); a delta that would save nothing is not made. A complete version with
    the same weights and parent stays as it is; a half-written one is replaced. `stage(target, manifest,
    directory)` may take the whole weights of a delta out of the directory: `staging.stage_whole`.
    Raises: WeightsError if a complete version has other content.
    """
    publishing = publishing or Publishing()
    target = version_dir(folder, version)
    with _staging(target) as staging:
        write(staging)
        if publishing.dtype == "bfloat16":
            cast_folder(staging)
        manifest = _whole_manifest(staging, policy, version, parent_version)
        if is_complete(target):
            return _require_same(target, manifest)
        if version % publishing.anchor_every:
            manifest = _as_delta(folder, staging, manifest)
        if not manifest.is_whole:
            if stage is not None:
                stage(target, manifest, staging)
            (staging / MODEL_FILE).unlink(missing_ok=True)
        _move(staging, target, manifest)
    return manifest


def repair_version(target: Path, write: Callable[[Path], None]) -> WeightManifest:
    """Writes a corrupt version again, whole, from a trainer that still holds its weights.

    File by file into the folder, which stays complete: killed in between, the version is as damaged as before
    or mended, and a repair may begin again.
    Raises: WeightsError if what `write` makes (cast as the version was) has not the digest that the version's
    manifest names; FileNotFoundError if there is no complete version.
    """
    kept = read_manifest(target, verified=False)
    with _staging(target) as staging:
        write(staging)
        made = _whole_manifest(staging, kept.policy, kept.version, kept.parent_version)
        if made.digest != kept.digest:
            cast_folder(staging)
            made = _whole_manifest(staging, kept.policy, kept.version, kept.parent_version)
        if made.digest != kept.digest:
            raise WeightsError(f"{target}: not repaired: digest {made.digest}, expected {kept.digest}")
        _mend(staging, target, made)
    return made


def cast_folder(folder: Path) -> None:
    """Rounds the float32 tensors of a whole folder to bfloat16, and says so in its config.

    Raises: WeightsError if its weights are no safetensors file.
    """
    model, config = folder / MODEL_FILE, folder / CONFIG_FILE
    try:
        if not has_dtype(model, "F32"):
            return
        cast_to_bfloat16(model, cast := folder / ".cast")
    except WeightFileError as error:
        raise WeightsError(str(error)) from error
    cast.replace(model)
    if config.is_file():
        values = json.loads(config.read_text())
        values["torch_dtype" if "torch_dtype" in values else "dtype"] = "bfloat16"
        config.unlink()  # it may be a link to another version's
        config.write_text(json.dumps(values, indent=2))


def read_manifest(folder: Path, *, verified: bool = True) -> WeightManifest:
    """The manifest of a complete version; `verified` also checks the file that the folder holds.

    That is the digest of whole weights; of a delta its framing and that it belongs to this version (what it
    rebuilds is checked when it is applied).
    Raises: FileNotFoundError if the version is missing or half-written; WeightsError if it is corrupt.
    """
    if not is_complete(folder):
        raise FileNotFoundError(f"no complete weight version at {folder}")
    try:
        values = json.loads((folder / MANIFEST_FILE).read_text())
        schema_version = values.get("schema_version")
        if schema_version != SCHEMA_VERSION:
            raise WeightsError(f"{folder}: schema_version {schema_version}, expected {SCHEMA_VERSION}")
        manifest = WeightManifest(**{"stored_bytes": values.get("size_bytes"), **values})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise WeightsError(f"{folder}: manifest unreadable: {error}") from error
    if verified:
        _require_intact(folder, manifest)
    return manifest


def newest_complete(folder: Path) -> int | None:
    """The highest complete version in a policy's folder, None if there is none."""
    return max(complete_versions(folder), default=None)


def complete_versions(folder: Path) -> list[int]:
    """The complete versions in a policy's folder, in order."""
    return sorted(version for version, path in _versions(folder) if is_complete(path))


def discard_after(folder: Path, version: int) -> list[int]:
    """Deletes every version above `version` and returns their numbers: nothing committed refers to them.

    What a killed writer had not moved to its place goes too.
    """
    doomed = sorted(number for number, _ in _versions(folder) if number > version)
    for number in doomed:
        delete_version(folder, number)
    for staging in folder.glob(".v*.tmp"):
        shutil.rmtree(staging)
    return doomed


def delete_version(folder: Path, version: int) -> None:
    """Deletes a version, DONE first, so that no reader sees a half-deleted one."""
    path = version_dir(folder, version)
    (path / DONE_FILE).unlink(missing_ok=True)
    shutil.rmtree(path)


def discard_states(folder: Path, *, keep: str | Iterable[str] | None) -> list[str]:
    """Deletes a policy's trainer states but those that `keep` names, and killed writers'; their names.

    Only the file names of `keep` count: its paths may be those of before the home was moved.
    """
    kept = {Path(path).name for path in ([keep] if isinstance(keep, str) else keep or ())}
    doomed = sorted(path for path in folder.glob("*") if path.name not in kept) if folder.is_dir() else []
    doomed += sorted(folder.glob(".s*.tmp"))
    for path in dict.fromkeys(doomed):
        path.unlink(missing_ok=True)
    return [path.name for path in dict.fromkeys(doomed)]


def is_complete(folder: Path) -> bool:
    """True if the version was published to the end."""
    return (folder / DONE_FILE).is_file()


def _versions(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((path, _VERSION_NAME.fullmatch(path.name)) for path in folder.iterdir())
    return [(int(match[1]), path) for path, match in matches if match]


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A new folder beside the target, gone at the end unless it was moved."""
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move(staging: Path, target: Path, manifest: WeightManifest) -> None:
    (staging / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=1))
    for path in (*staging.rglob("*"), staging):  # an adapter lies in a folder of its own
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    sync(target.parent)
    replace_file(target / DONE_FILE, lambda path: path.write_text(manifest.digest))


def _mend(staging: Path, target: Path, manifest: WeightManifest) -> None:
    """Moves the staged files over those of a complete version; the new weights count with the manifest."""
    for path in [path for path in staging.rglob("*") if path.is_file()]:
        sync(path)
        place = target / path.relative_to(staging)
        place.parent.mkdir(exist_ok=True)
        path.replace(place)
        sync(place.parent)
    replace_file(target / MANIFEST_FILE, lambda path: path.write_text(json.dumps(asdict(manifest), indent=1)))
    (target / DELTA_FILE).unlink(missing_ok=True)


def _whole_manifest(staging: Path, policy: str, version: int, parent_version: int | None) -> WeightManifest:
    model = staging / MODEL_FILE
    size_bytes = model.stat().st_size
    return WeightManifest(
        policy=policy,
        version=version,
        parent_version=parent_version,
        digest=file_digest(model),
        size_bytes=size_bytes,
        stored_bytes=size_bytes,
    )


def _as_delta(folder: Path, staging: Path, manifest: WeightManifest) -> WeightManifest:
    """Replaces the staged weights by a delta of the line's last anchor if that saves enough."""
    base = _anchor(folder, manifest)
    if base is None:
        return manifest
    delta, model = staging / DELTA_FILE, staging / MODEL_FILE
    try:
        write_delta(version_dir(folder, base.version) / MODEL_FILE, model, delta, base_digest=base.digest)
    except (DeltaError, FileNotFoundError) as error:
        log.warning("policy=%s version=%d is kept whole: %s", manifest.policy, manifest.version, error)
        delta.unlink(missing_ok=True)
        return manifest
    stored_bytes = delta.stat().st_size
    if stored_bytes > DENSE_SHARE * manifest.size_bytes:
        delta.unlink()
        return manifest
    return replace(manifest, base_version=base.version, base_digest=base.digest, stored_bytes=stored_bytes)


def _anchor(folder: Path, manifest: WeightManifest) -> WeightManifest | None:
    """The anchor of the version that this one was trained from; else the newest one below it."""
    wanted = manifest.parent_version
    below = [version for version in complete_versions(folder) if version < manifest.version]
    for version in ([wanted] if wanted in below else []) + below[::-1]:
        found = read_manifest(version_dir(folder, version), verified=False)
        if not found.is_whole and found.base_version in below:
            found = read_manifest(version_dir(folder, found.base_version), verified=False)
        if found.is_whole:
            return found
    return None


def _require_intact(folder: Path, manifest: WeightManifest) -> None:
    path = folder / manifest.weights_file
    if not path.is_file():
        raise WeightsError(f"{path}: no file, expected digest {manifest.digest}")
    if manifest.is_whole:
        if (got := file_digest(path)) != manifest.digest:
            raise WeightsError(f"{path}: digest {got}, expected digest {manifest.digest}")
        return
    try:
        facts = read_facts(path)
    except DeltaError as error:
        raise WeightsError(str(error)) from error
    if (facts.digest, facts.base_digest) != (manifest.digest, manifest.base_digest):
        raise WeightsError(
            f"{path}: turns {facts.base_digest} into {facts.digest}, the manifest has {manifest}"
        )


def _require_same(target: Path, offered: WeightManifest) -> WeightManifest:
    kept = read_manifest(target, verified=False)

    def said(manifest: WeightManifest) -> tuple[object, ...]:
        return manifest.policy, manifest.version, manifest.parent_version, manifest.digest

    if said(kept) != said(offered):
        raise WeightsError(f"{target} is complete with {kept}; refused to replace it by {offered}")
    return kept
