"""The mark of dropped tokens: which tables of a sealed step retention has removed, and why.

`meg/<run>/step=000012/dropped.json` is created if absent, before the first file is removed, so that a reader
can tell a hole that was wanted from a lost file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from megloom.compute.store.errors import CorruptFile
from megloom.compute.store.files import Folder
from megloom.compute.store.manifest import step_folder

DROPPED = "dropped.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """`at` is the time of the drop as its writer wrote it."""

    tables: tuple[str, ...]
    reason: str
    at: str


def read_dropped(folder: Folder, run: str, step: int) -> Dropped | None:
    """The step's mark, None if it has none.

    Raises: CorruptFile if it is damaged.
    """
    path = f"{step_folder(run, step)}/{DROPPED}"
    try:
        content = json.loads(folder.read(path))
        return Dropped(tables=tuple(content["tables"]), reason=str(content["reason"]), at=str(content["at"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{path}: not a mark of dropped tokens ({error})") from None
