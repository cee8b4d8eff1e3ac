"""Weight versions on disk, complete or not at all.

    <policy's folder>/v000123/{model.safetensors, config.json, tokenizer files, manifest.json, DONE}

The folder is a Hugging Face `save_pretrained` layout. It is written beside its place, flushed, digested,
moved there in one rename, and marked DONE last; a folder without DONE does not exist for any reader.
A complete version never changes. One writer per policy. No torch here: the caller writes the tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megloom.compute.state.durable import replace_file, sync

MODEL_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
DONE_FILE = "DONE"
SCHEMA_VERSION = 1
_VERSION_NAME = re.compile(r"v(\d{6,})")
_DIGEST_SIZE_BYTES = 32


class WeightsError(Exception):
    """A version is corrupt, or would be overwritten with other content. The message names the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """What a version folder says of itself. `digest` is blake2b (hex) of model.safetensors."""

    policy: str
    version: int
    parent_version: int | None
    digest: str
    size_bytes: int
    schema_version: int = SCHEMA_VERSION


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
) -> WeightManifest:
    """Publishes the files that `write(directory)` makes, which must include model.safetensors.

    A complete version with the same weights and parent stays as it is; a half-written one is replaced.
    Raises: WeightsError if a complete version has other content.
    """
    target = version_dir(folder, version)
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        write(staging)
        model = staging / MODEL_FILE
        manifest = WeightManifest(
            policy=policy,
            version=version,
            parent_version=parent_version,
            digest=file_digest(model),
            size_bytes=model.stat().st_size,
        )
        if is_complete(target):
            _require_same(target, manifest)
            return manifest
        (staging / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=1))
        for path in (*staging.iterdir(), staging):
            sync(path)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    replace_file(target / DONE_FILE, lambda path: path.write_text(manifest.digest))
    return manifest


def read_manifest(folder: Path, *, verified: bool = True) -> WeightManifest:
    """The manifest of a complete version; `verified` also compares the size and digest of its weights.

    Raises: FileNotFoundError if the version is missing or half-written; WeightsError if it is corrupt.
    """
    if not is_complete(folder):
        raise FileNotFoundError(f"no complete weight version at {folder}")
    try:
        manifest = WeightManifest(**json.loads((folder / MANIFEST_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"{folder}: manifest unreadable: {error}") from error
    if manifest.schema_version > SCHEMA_VERSION:
        raise WeightsError(
            f"{folder}: schema_version {manifest.schema_version}, newest known {SCHEMA_VERSION}"
        )
    if verified:
        model = folder / MODEL_FILE
        if not model.is_file() or (got := file_digest(model)) != manifest.digest:
            found = "no file" if not model.is_file() else f"digest {got}"
            raise WeightsError(f"{model}: {found}, expected digest {manifest.digest}")
    return manifest


def newest_complete(folder: Path) -> int | None:
    """The highest complete version in a policy's folder, None if there is none."""
    return max((version for version, path in _versions(folder) if is_complete(path)), default=None)


def discard_after(folder: Path, version: int) -> list[int]:
    """Deletes every version above `version` and returns their numbers: nothing committed refers to them.

    What a killed writer had not moved to its place goes too.
    """
    doomed = sorted((number, path) for number, path in _versions(folder) if number > version)
    for _, path in doomed:
        (path / DONE_FILE).unlink(missing_ok=True)  # first, so that no reader sees a half-deleted version
        shutil.rmtree(path)
    for staging in folder.glob(".v*.tmp"):
        shutil.rmtree(staging)
    return [number for number, _ in doomed]


def discard_states(folder: Path, *, keep: str | None) -> list[str]:
    """Deletes a policy's trainer states but the one at path `keep`, and killed writers'; their names."""
    doomed = sorted(path for path in folder.glob("*") if str(path) != keep) if folder.is_dir() else []
    doomed += sorted(folder.glob(".s*.tmp"))
    for path in dict.fromkeys(doomed):
        path.unlink(missing_ok=True)
    return [path.name for path in dict.fromkeys(doomed)]


def is_complete(folder: Path) -> bool:
    """True if the version was published to the end."""
    return (folder / DONE_FILE).is_file()


def file_digest(path: Path) -> str:
    """blake2b of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_SIZE_BYTES)).hexdigest()


def _versions(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((path, _VERSION_NAME.fullmatch(path.name)) for path in folder.iterdir())
    return [(int(match[1]), path) for path, match in matches if match]


def _require_same(target: Path, offered: WeightManifest) -> None:
    kept = read_manifest(target, verified=False)
    if kept != offered:
        raise WeightsError(f"{target} is complete with {kept}; refused to replace it by {offered}")
