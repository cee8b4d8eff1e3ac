"""`megloom versions …`: what weight versions a run has, and what one may do with them."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megloom.compute.conductor.run import RunPaths
    from megloom.compute.state.versions import StoredVersion

_COLUMNS = ("policy", "version", "parent", "step", "kind", "stored", "size_mb", "pinned", "committed")


def register(commands: Any, parser_class: type[argparse.ArgumentParser]) -> None:
    """Adds `versions` and its verbs to the subparsers of `megloom`."""
    versions = commands.add_parser("versions", help="a run's weight versions: list, roll back, export, pin")
    verbs = versions.add_subparsers(required=True, metavar="VERB", parser_class=parser_class)
    listing = _verb(verbs, "list", "all versions, or those of one policy", _list, policy="?", version=False)
    listing.add_argument("--json", action="store_true", help="as JSON")
    show = _verb(verbs, "show", "a version's manifest and what made it", _show)
    show.add_argument("--json", action="store_true", help="as JSON")
    _verb(verbs, "rollback", "make an older version the committed one, after the step in work", _roll_back)
    export = _verb(verbs, "export", "write a version as a Hugging Face folder", _export)
    export.add_argument("--out", help="new folder to write (default: RUN-POLICY-vVERSION)")
    export.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: as it was published")
    _verb(verbs, "pin", "keep a version and its trainer state from being pruned", _pin)
    _verb(verbs, "unpin", "lift a pin", _unpin)


def _verb(
    verbs: Any,
    name: str,
    text: str,
    command: Callable[[argparse.Namespace], int],
    *,
    policy: str | None = None,
    version: bool = True,
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    verb.add_argument("run", metavar="RUN", help="name of the run")
    verb.add_argument("policy", metavar="POLICY", nargs=policy, help="name of the policy")
    if version:
        verb.add_argument("version", metavar="VERSION", type=_number, help="its number, or last")
    verb.add_argument("--home", help="folder of the service's files (default: $MEGLOOM_HOME or .megloom)")
    verb.set_defaults(command=command)
    return verb


def _number(text: str) -> int:
    digits = text.rpartition("@")[2].removeprefix("v")
    if text == "last":
        return -1
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"version {text!r}: expected a number, or last")
    return int(digits)


def _list(arguments: argparse.Namespace) -> int:
    """Prints a row for each version on the disk, oldest first."""
    paths = _run_paths(arguments)
    policies = [_policy(paths, arguments.policy)] if arguments.policy else _policies(paths)
    rows = [row for policy in policies for row in _rows(paths, policy)]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = [_COLUMNS, *[tuple(_cell(row[column]) for column in _COLUMNS) for row in rows]]
    widths = [max(len(line[at]) for line in table) for at in range(len(_COLUMNS))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for row in rows:
        if row["damage"]:
            print(f"damaged: {row['policy']}@{row['version']}: {row['damage']}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    paths, policy, version = _named(arguments)
    from megloom.compute.state.weights import read_manifest

    folder = _folder(paths, policy, version)
    row = next(row for row in _rows(paths, policy) if row["version"] == version)
    shown = {**row, "uri": str(folder), "manifest": asdict(read_manifest(folder, verified=False))}
    if made := _made_by(paths, policy).get(version):
        shown["made_by"] = made
    if arguments.json:
        print(json.dumps(shown, indent=1))
        return 0
    for name, value in shown.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, entry in value.items():
                print(f"  {key}: {_cell(entry)}")
        elif value is not None:
            print(f"{name}: {_cell(value)}")
    return 0


def _roll_back(arguments: argparse.Namespace) -> int:
    """Asks the service if one is up; otherwise does it here, with the service kept out meanwhile."""
    paths, policy, version = _named(arguments)
    from megloom.compute.conductor.client import ServiceClient, ServiceError, read_address

    home = _home(arguments)
    if read_address(home) is not None:
        try:
            done = ServiceClient(home).roll_back(paths.run, policy, version)
        except ServiceError as error:
            raise ValueError(str(error)) from error
    else:
        done = _roll_back_here(home, paths.run, policy, version)
    state = "with its trainer state" if done["with_state"] else "with fresh moments (no state of it is kept)"
    print(
        f"rollback run={done['run']} policy={policy} from={done['from_version']} to={done['version']}"
        f" step={done['step']} {state}"
    )
    return 0


def _roll_back_here(home: Path, run: str, policy: str, version: int) -> dict[str, Any]:
    import asyncio
    import fcntl

    from megloom.compute.conductor.keeping import UnknownVersion
    from megloom.compute.conductor.sessions import UnknownRun, roll_back_on_disk

    with (home / "service.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"the service in {home} is starting or stopping; try again") from None
        try:
            return asdict(asyncio.run(roll_back_on_disk(home, run, policy, version, wall_time=_now)))
        except (UnknownRun, UnknownVersion) as error:
            raise ValueError(str(error)) from error


def _export(arguments: argparse.Namespace) -> int:
    """Writes the folder whole or not at all."""
    paths, policy, version = _named(arguments)
    from megloom.compute.state.exporting import export_version
    from megloom.compute.state.weights import WeightsError

    out = Path(arguments.out or f"{paths.run}-{policy}-v{version:06d}")
    try:
        size_bytes = export_version(_folder(paths, policy, version), out, dtype=arguments.dtype)
    except WeightsError as error:
        raise ValueError(str(error)) from error
    print(f"export policy={policy} version={version} bytes={size_bytes} path={out}")
    return 0


def _pin(arguments: argparse.Namespace) -> int:
    paths, policy, version = _named(arguments)
    from megloom.compute.state.versions import pin

    pin(Path(paths.weights(policy)), version)
    print(f"pinned {policy}@{version}")
    return 0


def _unpin(arguments: argparse.Namespace) -> int:
    paths, policy, version = _named(arguments)
    from megloom.compute.state.versions import unpin

    was = unpin(Path(paths.weights(policy)), version)
    print(f"unpinned {policy}@{version}" if was else f"{policy}@{version} was not pinned")
    return 0


# --- what is there


def _home(arguments: argparse.Namespace) -> Path:
    from megloom.home import service_home

    return service_home(arguments.home)


def _run_paths(arguments: argparse.Namespace) -> RunPaths:
    """Raises: ValueError naming the nearest run, if there is none of that name."""
    from megloom.compute.conductor.sessions import UnknownRun, stored_run

    try:
        return stored_run(_home(arguments), arguments.run)
    except UnknownRun as error:
        raise ValueError(str(error)) from error


def _policies(paths: RunPaths) -> list[str]:
    root = Path(paths.weights("any")).parent
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _policy(paths: RunPaths, policy: str) -> str:
    from megloom.compute.store.lineage.run_index import did_you_mean

    known = _policies(paths)
    if policy not in known:
        there = f"it has {', '.join(known)}" if known else "it has no weights yet"
        raise ValueError(f"run {paths.run} has no policy {policy!r} ({there}){did_you_mean(policy, known)}")
    return policy


def _named(arguments: argparse.Namespace) -> tuple[RunPaths, str, int]:
    """The run, policy and version that were named. Raises: ValueError with the nearest that there is."""
    from megloom.compute.state.weights import complete_versions

    paths = _run_paths(arguments)
    policy = _policy(paths, arguments.policy)
    known = complete_versions(Path(paths.weights(policy)))
    version = known[-1] if arguments.version == -1 and known else arguments.version
    if version not in known:
        nearest = min(known, key=lambda number: abs(number - version), default=None)
        raise ValueError(
            f"run {paths.run} has no version {version} of {policy} on the disk (nearest: {nearest};"
            f" see: megloom versions list {paths.run} {policy})"
        )
    return paths, policy, version


def _folder(paths: RunPaths, policy: str, version: int) -> Path:
    from megloom.compute.state.weights import version_dir

    return version_dir(Path(paths.weights(policy)), version)


def _rows(paths: RunPaths, policy: str) -> list[dict[str, Any]]:
    from megloom.compute.state.versions import list_versions

    made, committed = _made_by(paths, policy), _committed(paths, policy)
    return [
        _row(policy, stored, made.get(stored.version, {}), is_committed=stored.version == committed)
        for stored in list_versions(Path(paths.weights(policy)))
    ]


def _row(policy: str, stored: StoredVersion, made: dict[str, Any], *, is_committed: bool) -> dict[str, Any]:
    manifest = stored.manifest
    base = "?" if manifest is None else "whole" if manifest.is_whole else f"delta of {manifest.base_version}"
    return {
        "policy": policy,
        "version": stored.version,
        "parent": manifest.parent_version if manifest else None,
        "step": made.get("step"),
        "kind": made.get("kind"),
        "stored": base,
        "size_mb": round(manifest.stored_bytes / 1e6, 3) if manifest else None,
        "pinned": stored.is_pinned,
        "committed": is_committed,
        "damage": stored.damage,
    }


def _made_by(paths: RunPaths, policy: str) -> dict[int, dict[str, Any]]:
    """What the lineage knows of the policy's versions; empty before the first sealed step."""
    from megloom.compute.store.errors import StoreError
    from megloom.compute.store.lineage.run_index import RunIndex
    from megloom.compute.store.lineage.versions import VersionGraph

    try:
        rows = VersionGraph(RunIndex(paths.store_root, paths.run)).rows
    except (FileNotFoundError, StoreError):
        return {}
    return {version: asdict(row) for (name, version), row in rows.items() if name == policy}


def _committed(paths: RunPaths, policy: str) -> int | None:
    from megloom.compute.conductor.ledger import Ledger
    from megloom.compute.store.reader import MegReader

    reader = MegReader(paths.store_root)
    last = reader.last_sealed_step(paths.run)
    if last is None:
        return None
    ledger = Ledger.from_json(reader.read_manifest(paths.run, last).snapshot["ledger"])
    return ledger.policies[policy].version if policy in ledger.policies else None


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else str(value)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
