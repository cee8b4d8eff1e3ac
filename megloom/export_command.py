"""`megloom export`: a run's calls as a file of chat conversations, for other tools to train or look at."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    """Adds the command to the subparsers of `megloom`."""
    export = commands.add_parser("export", help="write a run's calls as chat conversations (jsonl, parquet)")
    add_store(export)
    export.add_argument("--format", choices=["jsonl", "parquet"], help="default: by the ending of --out")
    export.add_argument("--out", help="file to write, replaced whole (default: RUN.jsonl or RUN.parquet)")
    export.add_argument("--purpose", choices=["train", "eval", "all"], default="train")
    export.add_argument("--steps", metavar="A:B", help="steps A to B, both included; A:, :B or one step too")
    export.add_argument("--agent", help="only the calls of this agent")
    export.add_argument("--min-reward", type=float, metavar="X", help="only calls with a reward of X or more")
    export.add_argument("--tokens", action="store_true", help="add token_ids, logprobs and loss_mask")
    export.set_defaults(command=run_export)


def add_store(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which run of which store."""
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--home", help="folder of the service's files (default: $MEGLOOM_HOME or .megloom)")
    parser.add_argument("--store", metavar="URL", help="the store itself, for example s3://bucket/store")


def store_root(arguments: argparse.Namespace) -> str:
    from megloom.home import service_home

    return arguments.store or str(service_home(arguments.home) / "store")


def parse_steps(text: str | None) -> tuple[int | None, int | None]:
    """The first and last step of `A:B`, `A:`, `:B` or `A`; None where there is no bound.

    Raises: ValueError for any other form.
    """
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    if not all(part.isdecimal() or (colon and not part) for part in (first, last if colon else first)):
        raise ValueError(f"--steps {text}: expected A:B, A:, :B or a step")
    low, high = (int(part) if part else None for part in (first, last if colon else first))
    if low is not None and high is not None and low > high:
        raise ValueError(f"--steps {text}: the first step is after the last")
    return low, high


def run_export(arguments: argparse.Namespace) -> int:
    """Writes the file and prints its rows and bytes. Raises: ValueError, FileNotFoundError for one line."""
    first, last = parse_steps(arguments.steps)
    path, kind = _target(arguments)
    from megloom.compute.store.errors import StoreError, TokensDropped
    from megloom.compute.store.export import Exported, Selection, export_rows
    from megloom.compute.store.export_files import write_jsonl, write_parquet
    from megloom.compute.store.reader import MegReader

    selection = Selection(
        run=arguments.run,
        purpose=arguments.purpose,
        first_step=first,
        last_step=last,
        agent=arguments.agent,
        min_reward=arguments.min_reward,
        tokens=arguments.tokens,
    )
    exported = Exported()
    try:
        rows = export_rows(MegReader(store_root(arguments)), selection, exported=exported, notice=_warn)
        size_bytes = (
            write_jsonl(rows, path) if kind == "jsonl" else write_parquet(rows, path, tokens=arguments.tokens)
        )
    except TokensDropped as error:
        raise ValueError(f"{error}; export without --tokens, or later --steps") from error
    except StoreError as error:
        raise ValueError(str(error)) from error
    left_out = f" unanswered_calls_left_out={exported.num_unanswered}" if exported.num_unanswered else ""
    print(f"export rows={exported.num_rows} bytes={size_bytes} path={path}{left_out}")
    return 0


def _target(arguments: argparse.Namespace) -> tuple[Path, str]:
    ending = Path(arguments.out).suffix.removeprefix(".") if arguments.out else ""
    kind = arguments.format or (ending if ending == "parquet" else "jsonl")
    path = Path(arguments.out or f"{arguments.run}.{kind}")
    if path.is_dir():
        raise ValueError(f"--out {path}: is a folder, expected a file name")
    return path, kind


def _warn(text: str) -> None:
    print(f"megloom: {text}", file=sys.stderr)
