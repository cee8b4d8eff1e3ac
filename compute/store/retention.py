"""Drops the tokens of old steps: what was said and sampled goes, what happened (lineage) stays.

A step's tokens may go when every policy version that it made is older than the newest K of that policy. A
step that made none goes with the last step before it that did; a policy that was never trained keeps
nothing. Dropping publishes `dropped.json` beside the manifest (create-if-absent), then removes the files: a
crash between the two is repaired by running again, and readers of what is gone get `TokensDropped`. Manifests
stay as they are. Only sealed steps are looked at, so a running session is no obstacle.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from megloom.compute.store.dropped import DROPPED, Dropped, read_dropped
from megloom.compute.store.files import Folder
from megloom.compute.store.manifest import step_folder
from megloom.compute.store.reader import MegReader

TOKEN_TABLES = ("messages", "segments")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """The token files of a step that are still there. `names` are relative to the step's folder."""

    step: int
    names: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to drop so that the tokens of the newest `keep` versions stay.

    `first_kept` is the oldest step that keeps its tokens, None if there is none.
    """

    run: str
    keep: int
    steps: tuple[StepTokens, ...]
    first_kept: int | None

    @property
    def num_files(self) -> int:
        return sum(len(step.names) for step in self.steps)

    @property
    def size_bytes(self) -> int:
        return sum(step.size_bytes for step in self.steps)


def plan_retention(reader: MegReader, run: str, keep: int, *, first_step: int = 0) -> Plan:
    """What may be dropped, from step `first_step` on. Changes nothing.

    A caller that drops after every step passes the last plan's `first_kept`, so that a plan costs what the
    kept steps cost. Files that an interrupted run left are in the plan again.

    Raises: ValueError if `keep` is below 1; FileNotFoundError for an unknown run.
    """
    if keep < 1:
        raise ValueError(f"run {run}: keep the tokens of at least 1 version, got {keep}")
    steps = [step for step in reader.sealed_steps(run) if step >= first_step]
    if not steps:
        known = ", ".join(reader.runs()) or "none"
        raise FileNotFoundError(f"run {run}: no sealed step from {first_step} on (runs here: {known})")
    columns = ["policy", "version", "step"]
    made = reader.read_table(run, "policy_versions", steps, columns).to_pylist()
    droppable = _droppable(steps, [(row["policy"], row["version"], row["step"]) for row in made], keep)
    found = [_tokens_left(reader, run, step) for step in steps if step in droppable]
    return Plan(
        run=run,
        keep=keep,
        steps=tuple(tokens for tokens in found if tokens.names),
        first_kept=next((step for step in steps if step not in droppable), None),
    )


def apply(folder: Folder, plan: Plan, *, at: str) -> None:
    """Drops what the plan names, oldest step first. `at` is the wall-clock time that the marks tell.

    Raises: StoreError if a file cannot be removed; what is left is in the next plan.
    """
    reason = f"only the tokens of the newest {plan.keep} versions of each policy are kept"
    mark = json.dumps(asdict(Dropped(tables=TOKEN_TABLES, reason=reason, at=at))).encode()
    for step in plan.steps:
        where = step_folder(plan.run, step.step)
        with suppress(FileExistsError):  # an earlier run was interrupted after it
            folder.publish(f"{where}/{DROPPED}", mark)
        for name in step.names:
            folder.remove(f"{where}/{name}")


def _droppable(steps: Iterable[int], made: Iterable[tuple[str, int, int]], keep: int) -> set[int]:
    """The steps of which no made version (policy, version, step) is among the newest `keep` of its policy."""
    step_of: dict[str, dict[int, int]] = defaultdict(dict)
    for policy, version, step in made:
        step_of[policy][version] = step
    trained = {policy: versions for policy, versions in step_of.items() if set(versions) != {0}} or step_of
    newest = {policy: sorted(versions, reverse=True)[:keep] for policy, versions in trained.items()}
    kept = {trained[policy][version] for policy, versions in newest.items() for version in versions}
    making = {step for versions in trained.values() for step in versions.values()}
    droppable: set[int] = set()
    follows_kept = True  # before the first version there is nothing to judge a step by
    for step in steps:
        if step in making:
            follows_kept = step in kept
        if not follows_kept:
            droppable.add(step)
    return droppable


def _tokens_left(reader: MegReader, run: str, step: int) -> StepTokens:
    where = step_folder(run, step)
    present = set(reader.folder.names(where))
    mark = read_dropped(reader.folder, run, step) if DROPPED in present else None
    tables = set(TOKEN_TABLES) if mark is None else set(TOKEN_TABLES) & set(mark.tables)
    files = [
        file
        for file in reader.read_manifest(run, step).files
        if file.table in tables and file.name in present
    ]
    return StepTokens(
        step=step,
        names=tuple(file.name for file in files),
        size_bytes=sum(file.size_bytes for file in files),
    )
