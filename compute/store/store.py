"""The MEG store as the conductor uses it: record, flush, and seal a step at its commit.

One store serves one run: its journal has no run column. Of several stores on one run only the newest seals
(`writers.py`). All methods belong to the event loop's thread; blocking work goes through the injected
`Offload`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megloom.compute.graph.records import TABLE_OF
from megloom.compute.store.errors import StoreError
from megloom.compute.store.files import Folder
from megloom.compute.store.journal import Journal
from megloom.compute.store.lineage.compaction import compact
from megloom.compute.store.manifest import Manifest, path_name
from megloom.compute.store.offload import Offload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.recovery import remove_orphans
from megloom.compute.store.retention import Plan, apply, plan_retention
from megloom.compute.store.seal import write_rows
from megloom.compute.store.writers import check_writer, claim_writer


class MegStore:
    """Final records in, sealed steps out. `root` is a local path, an fsspec URL, or a `Folder` on one."""

    def __init__(self, *, root: str | Folder, journal: Journal, offload: Offload) -> None:
        self._folder = Folder(root) if isinstance(root, str) else root
        self.reader = MegReader(self._folder)
        self._journal, self._offload = journal, offload
        self._closed_through = -1  # records of this step and of earlier ones are refused
        self._agents: set[str | None] = {None}
        self._writers: dict[str, int] = {}  # our epoch by run
        self._first_kept: dict[str, int] = {}  # the oldest step by run whose tokens are there
        self._last: dict[str, int | None] = {}  # the last sealed step by run, once we are its writer

    def record(self, record: Any, *, step: int | None = None) -> None:
        """Journals a final record under `step`, by default its own. Cheap, never blocks, not yet durable.

        The same record again is ignored. Lone surrogates in its text are replaced.

        Raises: ValueError if it has no step and none is given, cannot be stored, or names an agent that is
        unfit for a file's name; ConflictingRecord if its key is known with other content; StoreError if the
        step is sealed or being sealed.
        """
        at = getattr(record, "step", None) if step is None else step
        if at is None:
            raise ValueError(f"a record of {TABLE_OF[type(record)]} has no step of its own: give one")
        if at <= self._closed_through:
            raise StoreError(f"{TABLE_OF[type(record)]}: step {at} is sealed, it takes no more records")
        agent = getattr(record, "agent", None)
        if agent not in self._agents:
            self._agents.add(path_name("agent", str(agent)))  # it will name files
        self._journal.append(record, at)

    async def flush(self) -> None:
        """Returns when all that was recorded before survives a SIGKILL."""
        await self._journal.flush()

    async def recover(self, run: str) -> Manifest | None:
        """The last sealed step's manifest, None for a new run. Call it before the first `record`.

        This store is the run's writer from now on: older ones seal nothing more. What a crash left half done
        is put right: files without a manifest are removed, journal rows that the seal covers are dropped, the
        index is completed. Rows of the open step stay, see `unsealed` and `keep_unsealed`.
        """
        last = await self._take_over(run)
        await self._offload.run(remove_orphans, self._folder, run, last)
        if last is None:
            return None
        manifest = await self._offload.run(self.reader.read_manifest, run, last)
        await self._journal.drop_through(last)
        self._closed_through = last
        await self._offload.run(compact, self._folder, run, last)
        return manifest

    async def snapshots(self, run: str) -> list[Mapping[str, Any]]:
        """The snapshot of every sealed step, in order."""
        steps = await self._offload.run(self.reader.sealed_steps, run)
        return [(await self._offload.run(self.reader.read_manifest, run, step)).snapshot for step in steps]

    async def unsealed(self, step: int | None = None) -> list[Any]:
        """The records that no seal covers yet, in order."""
        return await self._journal.load(step)

    async def keep_unsealed(self, records: Sequence[Any]) -> int:
        """Drops the others, for a conductor that does the rest of the open step again; how many."""
        return await self._journal.keep_only(records)

    async def seal(self, run: str, step: int, snapshot: Mapping[str, Any] | None = None) -> Manifest:
        """Writes the step's records as Parquet, publishes its manifest, and empties the journal of them.

        A step that is sealed already stays as it is: its manifest is returned and the journal emptied. So a
        seal that failed, on a full disk for example, may be called again.

        Raises: StoreError if an earlier step has unsealed records, a later one is sealed, a record belongs
        to another run, the sealed step is not the one in the journal, or another store has taken the run
        over; ValueError if the snapshot is not JSON. The journal is untouched then.
        """
        closed_through, self._closed_through = self._closed_through, max(step, self._closed_through)
        try:
            manifest = await self._sealed(run, step, snapshot or {})
        except BaseException:
            self._closed_through = closed_through
            raise
        await self._journal.drop_through(step)
        await self._offload.run(compact, self._folder, run, step)
        return manifest

    async def drop_tokens(self, run: str, keep: int, *, at: str, tell: Callable[[Plan], None]) -> None:
        """Drops the tokens of all but the newest `keep` versions; `tell` hears first of what goes.

        `at` is the wall-clock time. Does nothing if there is nothing to drop.
        """
        first = self._first_kept.get(run, 0)
        plan = await self._offload.run(partial(plan_retention, self.reader, run, keep, first_step=first))
        if plan.steps:
            tell(plan)
            await self._offload.run(partial(apply, self._folder, plan, at=at))
        self._first_kept[run] = plan.first_kept if plan.first_kept is not None else first

    async def _take_over(self, run: str) -> int | None:
        """Makes this store the run's writer; returns the last sealed step."""
        if run not in self._last:
            self._writers[run] = await self._offload.run(claim_writer, self._folder, run)
            self._last[run] = await self._offload.run(self.reader.last_sealed_step, run)
        return self._last[run]

    async def _sealed(self, run: str, step: int, snapshot: Mapping[str, Any]) -> Manifest:
        last = await self._take_over(run)
        fence = partial(check_writer, self._folder, run, self._writers[run])
        await self._offload.run(check_writer, self._folder, run, self._writers[run])
        if last is not None and step <= last and await self._offload.run(self.reader.is_sealed, run, step):
            return await self._sealed_before(run, step)
        if last is not None and step < last:
            raise StoreError(f"run {run}: cannot seal step {step}, step {last} is sealed")
        open_before = [at for at in self._journal.open_steps() if at < step]
        if open_before:
            raise StoreError(f"run {run}: cannot seal step {step}, step {min(open_before)} is not sealed")
        rows = await self._journal.rows(step)
        try:
            manifest = await self._offload.run(
                write_rows, self._folder, run, step, rows, last, snapshot, fence
            )
        except FileExistsError:
            raise StoreError(f"run {run}: another process has sealed step {step}") from None
        self._last[run] = step
        return manifest

    async def _sealed_before(self, run: str, step: int) -> Manifest:
        manifest = await self._offload.run(self.reader.read_manifest, run, step)
        num_sealed, num_open = sum(manifest.num_rows.values()), self._journal.open_steps().get(step, 0)
        if num_open not in (0, num_sealed):
            raise StoreError(
                f"run {run}: step {step} is sealed with {num_sealed} records, the journal has {num_open}"
            )
        return manifest
