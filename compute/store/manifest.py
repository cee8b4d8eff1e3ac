"""What a sealed step consists of. The manifest is written last: a step without one does not exist.

Layout under the store's root: `meg/<run>/step=000012/<table>[-<agent>]-<digest>.parquet` and `manifest.json`;
`<digest>` is the beginning of the file's digest. Steps of schema version 1 have names without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megloom.compute.graph.schemas import SCHEMA_VERSION, SCHEMAS
from megloom.compute.store.errors import CorruptFile, StoreError
from megloom.compute.store.files import file_digest

MANIFEST = "manifest.json"
MEG = "meg"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_STEP = re.compile(r"step=(\d{6,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedFile:
    """One Parquet file. `digest` is blake2b in hex; `agent` is None for tables that are not cut by agent."""

    name: str
    table: str
    agent: str | None
    num_rows: int
    size_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`snapshot` is the caller's JSON-like state at the seal (cursor, ledger); the store never reads it."""

    run: str
    step: int
    previous_step: int | None
    files: tuple[SealedFile, ...]
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def num_rows(self) -> dict[str, int]:
        """Records per table; the step's index, derived from them, does not count."""
        counts: dict[str, int] = {}
        for file in self.files:
            if file.table in SCHEMAS:
                counts[file.table] = counts.get(file.table, 0) + file.num_rows
        return counts


def run_folder(run: str) -> str:
    """Raises: ValueError if the run's name is not safe as a folder name."""
    return f"{MEG}/{path_name('run', run)}"


def step_folder(run: str, step: int) -> str:
    if step < 0:
        raise ValueError(f"run {run}: a step is 0 or more, got {step}")
    return f"{run_folder(run)}/step={step:06d}"


def step_of(folder_name: str) -> int | None:
    """The step of a folder name such as `step=000012`, None for any other name."""
    match = _STEP.fullmatch(folder_name)
    return int(match[1]) if match else None


def path_name(what: str, name: str) -> str:
    """Returns `name`.

    Raises: ValueError if it could leave its folder or hide in it.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r} must be 1 to 100 letters, digits, '_', '-' or '.', not first '.' or '-'"
        )
    return name


def signed_json(name: str, content: Mapping[str, Any]) -> bytes:
    """JSON with a digest of its own content, which stands under `name`.

    Raises: ValueError if the content is not JSON (NaN counts as not JSON); TypeError for foreign objects.
    """
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return f'{{"digest": "{file_digest(text.encode())}", "{name}": {text}}}'.encode()


def read_signed_json(name: str, data: bytes, path: str, *, what: str) -> dict[str, Any]:
    """The inverse of `signed_json`. Raises: CorruptFile, naming `path` and what it should have been."""
    try:
        outer = json.loads(data)
        content: dict[str, Any] = outer[name]
        digest = outer["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{path}: not {what} ({error})") from None
    if file_digest(json.dumps(content, sort_keys=True).encode()) != digest:
        raise CorruptFile(f"{path}: its content does not match its digest")
    return content


def manifest_bytes(manifest: Manifest) -> bytes:
    """JSON with a digest of its own content.

    Raises: ValueError if the snapshot is not JSON (NaN counts as not JSON); TypeError for foreign objects.
    """
    return signed_json("manifest", asdict(manifest))


def parse_manifest(data: bytes, path: str) -> Manifest:
    """The inverse of `manifest_bytes`.

    Raises: CorruptFile, naming `path`; StoreError if a newer version of this program wrote it.
    """
    content = read_signed_json("manifest", data, path, what="a manifest")
    if content["schema_version"] > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: schema version {content['schema_version']}, this reader knows {SCHEMA_VERSION}"
        )
    files = tuple(SealedFile(**file) for file in content.pop("files"))
    return Manifest(files=files, **content)
