"""Names of trained systems: a short name stands for `megloom.pipelines.systems.<name>:workload`.

Looks modules up without importing them, so that a wrong name is answered at once.
"""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

SYSTEMS = "megloom.pipelines.systems"


def resolve_system(name: str) -> str:
    """Returns `package.module:attribute` for a short name or a full one.

    Raises: ValueError with the nearest known name, if no such module exists.
    """
    module, colon, attribute = name.partition(":")
    full = module if "." in module or colon else f"{SYSTEMS}.{module}"
    try:
        found = importlib.util.find_spec(full) is not None
    except (ModuleNotFoundError, ValueError):
        found = False
    if not found:
        known = known_systems()
        near = difflib.get_close_matches(module, known, n=1)
        hint = f", did you mean '{near[0]}'?" if near else ""
        raise ValueError(
            f"no pipeline {name!r}{hint} (known: {', '.join(known)}, or package.module:attribute)"
        )
    return f"{full}:{attribute or 'workload'}"


def known_systems() -> list[str]:
    """The systems that come with the installation."""
    spec = importlib.util.find_spec(SYSTEMS)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in Path(folder).glob("*.py")]
    return sorted(path.stem for path in files if "\nworkload = Workload(" in path.read_text())
