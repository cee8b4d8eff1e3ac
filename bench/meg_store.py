"""The MEG store and the graph against their targets: appends, sealing, ready set, token storage, lineage.

Prints one JSON object `{figure: {value, unit, target, ok}}`; each part's docstring says what it measures.
Run from the root of a checkout: `python bench/meg_store.py [--only PART ...]`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

# A part is imported only if it runs: lineage needs DuckDB, the ready set needs next to nothing.
PARTS = {
    "appends": ("meg.appends", "append_figures"),
    "seal": ("meg.appends", "seal_figures"),
    "ready": ("meg.ready", "ready_figures"),
    "storage": ("meg.ready", "storage_figures"),
    "lineage": ("meg.lineage", "lineage_figures"),
}


def figures(parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of the parts, in their order."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        module, name = PARTS[part]
        measure: Callable[[], dict[str, dict[str, Any]]] = getattr(import_module(module), name)
        found |= measure()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen parts, by default all, and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    print(json.dumps(figures(parser.parse_args(arguments).only), indent=2))


if __name__ == "__main__":
    main()
