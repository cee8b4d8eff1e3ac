"""What a crash leaves behind in the sealed store: files that no manifest names.

Called by `MegStore.recover`, when its run has no other writer any more.
"""

from __future__ import annotations

from megloom.compute.store.files import DRAFT, Folder
from megloom.compute.store.manifest import run_folder, step_of


def remove_orphans(folder: Folder, run: str, last_sealed: int | None) -> list[str]:
    """Removes every file of the steps after the last sealed one; returns their paths.

    Such a step has no manifest, so no reader knows its files. A writer that was killed after the manifest
    may have left drafts in the last sealed step. What else a run's folder holds stays.
    """
    removed = []
    for name in folder.names(run_folder(run)):
        step = step_of(name)
        if step is None or (last_sealed is not None and step < last_sealed):
            continue
        for file in folder.names(f"{run_folder(run)}/{name}"):
            if step == last_sealed and not file.startswith(DRAFT):
                continue
            path = f"{run_folder(run)}/{name}/{file}"
            folder.remove(path)
            removed.append(path)
    return removed
