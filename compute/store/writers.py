"""Writer epochs: which of the stores that ever opened a run may still seal it.

A store claims the next number before it writes; the newest claim is the writer, and older ones are refused.
Layout: `meg/<run>/writers/000003.json`, created if absent, never removed.
"""

from __future__ import annotations

import json
import os
import re
import socket

from megloom.compute.store.errors import StoreError
from megloom.compute.store.files import Folder
from megloom.compute.store.manifest import run_folder

_EPOCH = re.compile(r"(\d{6,})\.json")


def claim_writer(folder: Folder, run: str) -> int:
    """Returns the epoch that is now this process's: 1 for the first writer of a run."""
    epoch = newest_writer(folder, run) + 1
    claim = json.dumps({"epoch": epoch, "host": socket.gethostname(), "pid": os.getpid()}).encode()
    while True:
        try:
            folder.publish(_path(run, epoch), claim)
            return epoch
        except FileExistsError:  # another store claims at the same time
            epoch += 1
            claim = json.dumps({"epoch": epoch, "host": socket.gethostname(), "pid": os.getpid()}).encode()


def newest_writer(folder: Folder, run: str) -> int:
    """The newest claim, 0 if there is none."""
    found = (_EPOCH.fullmatch(name) for name in folder.names(f"{run_folder(run)}/writers"))
    return max((int(match[1]) for match in found if match), default=0)


def check_writer(folder: Folder, run: str, epoch: int) -> None:
    """Raises: StoreError, naming both epochs, if a newer writer has claimed the run."""
    newest = newest_writer(folder, run)
    if newest > epoch:
        raise StoreError(
            f"run {run}: this store is writer {epoch}, writer {newest} has taken the run over"
            f" ({_path(run, newest)} says where): this one seals nothing more"
        )


def _path(run: str, epoch: int) -> str:
    return f"{run_folder(run)}/writers/{epoch:06d}.json"
