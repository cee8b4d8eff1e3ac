"""The training engine against its targets: DeepSpeed, revival, state swap, deltas, trees, TRL.

Prints one JSON object `{figure: {value, unit, target, ok}}`; each part's docstring says what it measures.
Run from the root of a checkout: `python bench/training.py [--only PART ...]`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

# Several parts run one after another, each in a process of its own, so that none warms or hinders the next.
PARTS = {
    "zero": ("training_parts.zero", "zero_figures"),
    "revive": ("training_parts.revive", "revive_figures"),
    "swap": ("training_parts.swap", "swap_figures"),
    "delta": ("training_parts.delta", "delta_figures"),
    "tree": ("training_parts.tree", "tree_figures"),
    "trl": ("training_parts.against_trl", "trl_figures"),
}


def figures(part: str) -> dict[str, dict[str, Any]]:
    """The figures of one part, measured in this process."""
    module, name = PARTS[part]
    measure: Callable[[], dict[str, dict[str, Any]]] = getattr(import_module(module), name)
    return measure()


def figures_of(parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures of the parts, in their order."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        command = [sys.executable, __file__, "--only", part]
        done = subprocess.run(command, stdout=subprocess.PIPE)  # what it complains of goes to our stderr
        if done.returncode:
            failed = {"value": None, "unit": f"exit code {done.returncode}", "target": None, "ok": False}
            found |= {part: failed}
        else:
            found |= json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen parts, by default all, and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parts = parser.parse_args(arguments).only
    print(json.dumps(figures(*parts) if len(parts) == 1 else figures_of(parts), indent=2))


if __name__ == "__main__":
    main()
