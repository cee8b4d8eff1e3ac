"""The MEG store as the conductor uses it: record, flush, and seal a step at its commit.

One store serves one run: its journal has no run column. All methods belong to the event loop's thread;
blocking work goes through the injected `Offload`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megloom.compute.graph.records import TABLE_OF
from megloom.compute.store.errors import StoreError
from megloom.compute.store.files import Folder
from megloom.compute.store.journal import Journal
from megloom.compute.store.manifest import Manifest
from megloom.compute.store.offload import Offload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.seal import write_step


class MegStore:
    """Final records in, sealed steps out. `root` is a local path or an fsspec URL."""

    def __init__(self, *, root: str, journal: Journal, offload: Offload) -> None:
        self.reader = MegReader(root)
        self._folder = Folder(root)
        self._journal, self._offload = journal, offload
        self._closed_through = -1  # records of this step and of earlier ones are refused
        self._steps: dict[
            str, list[int]
        ] = {}  # sealed steps by run, listed once: this store is the only writer

    def record(self, record: Any, *, step: int | None = None) -> None:
        """Journals a final record under `step`, by default its own. Cheap, never blocks, not yet durable.

        The same record again is ignored. Lone surrogates in its text are replaced.

        Raises: ValueError if it has no step and none is given, or cannot be stored; ConflictingRecord if its
        key is known with other content; StoreError if the step is sealed or being sealed.
        """
        at = getattr(record, "step", None) if step is None else step
        if at is None:
            raise ValueError(f"a record of {TABLE_OF[type(record)]} has no step of its own: give one")
        if at <= self._closed_through:
            raise StoreError(f"{TABLE_OF[type(record)]}: step {at} is sealed, it takes no more records")
        self._journal.append(record, at)

    async def flush(self) -> None:
        """Returns when all that was recorded before survives a SIGKILL."""
        await self._journal.flush()

    async def recover(self, run: str) -> Manifest | None:
        """The last sealed step's manifest, None for a new run. Call it before the first `record`.

        Journal rows that the seal covers (the process died between the two) are dropped; rows of the open
        step stay, see `unsealed` and `discard_unsealed`.
        """
        steps = await self._sealed_steps(run)
        if not steps:
            return None
        manifest = await self._offload.run(self.reader.read_manifest, run, steps[-1])
        await self._journal.drop_through(steps[-1])
        self._closed_through = steps[-1]
        return manifest

    async def snapshots(self, run: str) -> list[Mapping[str, Any]]:
        """The snapshot of every sealed step, in order."""
        steps = await self._sealed_steps(run)
        return [(await self._offload.run(self.reader.read_manifest, run, step)).snapshot for step in steps]

    async def unsealed(self, step: int | None = None) -> list[Any]:
        """The records that no seal covers yet, in order."""
        return await self._journal.load(step)

    async def discard_unsealed(self) -> int:
        """Drops them, for a conductor that starts the open step again from the last snapshot; how many."""
        return await self._journal.drop_through(max(self._journal.open_steps(), default=-1))

    async def seal(self, run: str, step: int, snapshot: Mapping[str, Any] | None = None) -> Manifest:
        """Writes the step's records as Parquet, publishes its manifest, and empties the journal of them.

        A step that is sealed already stays as it is: its manifest is returned and the journal emptied.

        Raises: StoreError if an earlier step has unsealed records, a later one is sealed, a record belongs
        to another run, or the sealed step is not the one in the journal; ValueError if the snapshot is not
        JSON. The journal is untouched then.
        """
        closed_through, self._closed_through = self._closed_through, max(step, self._closed_through)
        try:
            steps = await self._sealed_steps(run)
            if step in steps:
                manifest = await self._sealed_before(run, step)
            else:
                manifest = await self._seal(run, step, snapshot or {}, steps)
        except BaseException:
            self._closed_through = closed_through
            raise
        await self._journal.drop_through(step)
        return manifest

    async def _sealed_steps(self, run: str) -> list[int]:
        if run not in self._steps:
            self._steps[run] = await self._offload.run(self.reader.sealed_steps, run)
        return self._steps[run]

    async def _sealed_before(self, run: str, step: int) -> Manifest:
        manifest = await self._offload.run(self.reader.read_manifest, run, step)
        num_sealed, num_open = sum(manifest.num_rows.values()), self._journal.open_steps().get(step, 0)
        if num_open not in (0, num_sealed):
            raise StoreError(
                f"run {run}: step {step} is sealed with {num_sealed} records, the journal has {num_open}"
            )
        return manifest

    async def _seal(self, run: str, step: int, snapshot: Mapping[str, Any], steps: list[int]) -> Manifest:
        if steps and steps[-1] > step:
            raise StoreError(f"run {run}: cannot seal step {step}, step {steps[-1]} is sealed")
        open_before = [at for at in self._journal.open_steps() if at < step]
        if open_before:
            raise StoreError(f"run {run}: cannot seal step {step}, step {min(open_before)} is not sealed")
        records = await self._journal.load(step)
        foreign = {record.run for record in records if getattr(record, "run", run) != run}
        if foreign:
            raise StoreError(f"run {run}: step {step} holds records of run {', '.join(sorted(foreign))}")
        previous = steps[-1] if steps else None
        try:
            manifest = await self._offload.run(
                write_step, self._folder, run, step, records, previous, snapshot
            )
        except FileExistsError:
            raise StoreError(f"run {run}: another process has sealed step {step}") from None
        steps.append(step)
        return manifest
