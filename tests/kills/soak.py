"""`make soak`: random kills without end, or until `--kills` of them have happened. Prints each seed.

A failure ends it with the seed and the orders of all lives; `--seed` replays that run first.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from tests.kills.history import random_kills, run_through, undisturbed
from tests.kills.nursery import nursery


def main() -> None:
    """Runs until interrupted, a failure, or enough kills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=None, help="stop after so many; default: never")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=6, help="training steps of each run")
    parser.add_argument("--per-run", type=int, default=12, help="kills of each run, at most")
    options = parser.parse_args()
    total = 0
    with tempfile.TemporaryDirectory() as folder, nursery() as births:
        measure = undisturbed(births, Path(folder) / "undisturbed", steps=options.steps, seed=1)
        for seed in itertools.count(options.seed):
            with tempfile.TemporaryDirectory(dir=folder) as home:
                print(f"seed {seed}: ", end="", flush=True)
                kills = random_kills(seed, measure, num_kills=options.per_run)
                total += (num_kills := len(run_through(births, Path(home), measure, kills)))
            print(f"{num_kills} kills survived, {total} in all", flush=True)
            if options.kills is not None and total >= options.kills:
                return


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
