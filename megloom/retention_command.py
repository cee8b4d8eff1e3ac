"""`megloom retention`: drops the tokens of old steps of a run; what happened stays recorded."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from megloom.export_command import add_store, store_root


def register(commands: Any) -> None:
    """Adds the command to the subparsers of `megloom`."""
    retention = commands.add_parser("retention", help="drop the tokens of old steps, keep their lineage")
    add_store(retention)
    retention.add_argument(
        "--keep-tokens", type=int, required=True, metavar="K", help="keep those of the newest K versions"
    )
    retention.add_argument("--yes", action="store_true", help="drop them; without it only the report")
    retention.set_defaults(command=run_retention)


def run_retention(arguments: argparse.Namespace) -> int:
    """Prints what can be freed and, with --yes, frees it."""
    from megloom.compute.store.errors import StoreError
    from megloom.compute.store.reader import MegReader
    from megloom.compute.store.retention import apply, plan_retention

    reader = MegReader(store_root(arguments))
    try:
        plan = plan_retention(reader, arguments.run, arguments.keep_tokens)
        steps = [step.step for step in plan.steps]
        span = f" ({steps[0]}..{steps[-1]})" if steps else ""
        print(
            f"run {plan.run}: {'dropping' if arguments.yes else 'could drop'} the tokens and messages of"
            f" {len(steps)} steps{span}, files={plan.num_files} bytes={plan.size_bytes}",
            flush=True,
        )
        if not steps:
            return 0
        if not arguments.yes:
            print("nothing was dropped: run it again with --yes")
            return 0
        apply(reader.folder, plan, at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    except StoreError as error:
        raise ValueError(str(error)) from error
    print(f"dropped: {plan.num_files} files, {plan.size_bytes} bytes")
    return 0
