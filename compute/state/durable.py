"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, write: Callable[[Path], Result]) -> Result:
    """Calls `write` with a temporary path, then moves that file over `path`. One writer per path.

    Returns what `write` does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        result = write(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
        return result
    finally:
        temporary.unlink(missing_ok=True)
