"""A weight version as a folder of its own, for any tool that reads Hugging Face's layout."""

from __future__ import annotations

import shutil
from pathlib import Path

from megloom.compute.state.staging import full_folder
from megloom.compute.state.weight_file import has_dtype
from megloom.compute.state.weights import (
    DONE_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    WeightsError,
    cast_folder,
)


def export_version(version: Path, out: Path, *, dtype: str | None = None) -> int:
    """Writes the version's whole weights and companions to `out`; the bytes written. All or nothing.

    `dtype` "bfloat16" rounds float32 weights; "float32" is refused for weights that were published rounded.
    Raises: ValueError if `out` exists or the dtype cannot be had; WeightsError if the version is damaged.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; name a new folder")
    source = full_folder(version)
    if dtype == "float32" and has_dtype(source / MODEL_FILE, "BF16"):
        raise ValueError(f"{version} was published as bfloat16: its float32 weights are in no version")
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns(MANIFEST_FILE, DONE_FILE))
        if dtype == "bfloat16":
            cast_folder(draft)
        draft.rename(out)
    except OSError as error:
        raise WeightsError(f"{out} was not written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
