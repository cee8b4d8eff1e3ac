"""What a dead session left on the disk, and what must hold of it.

The contract. A record is *promised* once `flush` or `seal` has returned. From then on it is in the journal or
in a sealed step, unchanged, until a later start takes over the open step: it keeps what it can use of it and
discards the rest to do it again, so only sealed steps are history. A promise of the last life must be on the
disk now, one of an earlier life only if its step was sealed. A manifest, once there, never changes. The
newest one names weights and states that are there.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megloom.compute.conductor.run import RunPaths
from megloom.compute.graph.records import RECORDS, record_key
from megloom.compute.graph.schemas import from_table
from megloom.compute.state.weights import read_manifest
from megloom.compute.store.manifest import MANIFEST, step_folder
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.sqlite_journal import SqliteJournal
from tests.kills.cells import read_state
from tests.kills.life import RUN, fingerprint

Promise = tuple[int, str, str, str]  # step, table, key, hash
Content = dict[tuple[str, str], str]  # (table, key) → hash


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """A run as a reader finds it. `manifests` are raw bytes by step; `records` by step, then by table."""

    manifests: Mapping[int, bytes]
    snapshots: Mapping[int, Mapping[str, Any]]
    records: Mapping[int, Mapping[str, list[Any]]]
    journal: Content

    @property
    def last_step(self) -> int:
        return max(self.manifests, default=-1)

    def rows(self, table: str) -> list[Any]:
        """The sealed rows of a table, over all steps."""
        return [record for step in sorted(self.records) for record in self.records[step][table]]

    def sealed(self, step: int) -> Content:
        return content([record for rows in self.records.get(step, {}).values() for record in rows])


def content(records: Sequence[Any]) -> Content:
    return {(table, key): digest for table, key, digest in map(fingerprint, records)}


def read_disk(home: Path) -> Disk:
    """Reads all of it; every file is checked against its manifest. Changes nothing.

    Raises: what the reader raises for a step that is neither complete nor absent.
    """
    paths = RunPaths(home=home, run=RUN)
    reader = MegReader(paths.store_root)
    steps = reader.sealed_steps(RUN)
    assert steps == list(range(len(steps))), f"sealed steps have holes: {steps}"
    manifests, snapshots, records = {}, {}, {}
    for step in steps:
        manifests[step] = (Path(paths.store_root) / step_folder(RUN, step) / MANIFEST).read_bytes()
        manifest = reader.read_manifest(RUN, step)
        snapshots[step] = manifest.snapshot
        records[step] = {t: from_table(t, reader.read_table(RUN, t, steps=[step])) for t in RECORDS}
        found = {table: len(rows) for table, rows in records[step].items() if rows}
        promised = {table: num for table, num in manifest.num_rows.items() if table in RECORDS and num}
        assert found == promised, f"step {step}: rows {found}, its manifest says {promised}"
    return Disk(
        manifests=manifests, snapshots=snapshots, records=records, journal=_read_journal(paths.journal)
    )


def _read_journal(path: Path) -> Content:
    """The journal's records, read from a copy: opening it would repair the original before its owner does."""
    if not path.is_file():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        for part in path.parent.glob(f"{path.name}*"):
            if not part.name.endswith("-shm"):  # an index of the WAL, made again
                shutil.copy(part, folder)

        async def load() -> list[Any]:
            async with SqliteJournal.open(Path(folder) / path.name, InlineOffload()) as journal:
                return await journal.load()

        return content(asyncio.run(load()))


def check_after_death(disk: Disk, before: Disk | None, promises: Sequence[Promise], home: Path) -> None:
    """What holds after any death, at any point. `before` is the disk when this life began."""
    if before is not None:
        kept = {step: disk.manifests.get(step) for step in before.manifests}
        assert kept == before.manifests, "a sealed step has changed or is gone"
    sealed = {step: disk.sealed(step) for step in disk.manifests}
    for step, table, key, digest in promises:
        place = sealed.get(step, disk.journal)
        assert place.get((table, key)) == digest, f"promised and lost: step {step} {table} {key}"
    for (table, key), digest in disk.journal.items():
        for step, rows in sealed.items():
            found = rows.get((table, key), digest)
            assert found == digest, f"{table} {key}: the journal differs from sealed step {step}"
    check_ledger(disk, home)
    check_counts(disk)


def check_ledger(disk: Disk, home: Path) -> None:
    """The newest snapshot can be resumed: its weights and states are there, whole, and belong together."""
    if not disk.manifests:
        return
    ledger = disk.snapshots[disk.last_step]["ledger"]
    assert ledger["next_step"] == disk.last_step + 1
    for policy, entry in ledger["policies"].items():
        manifest = read_manifest(Path(entry["uri"]))
        assert (manifest.policy, manifest.version) == (policy, entry["version"])
        assert (manifest.digest, manifest.parent_version) == (entry["digest"], entry["parent_version"])
        if entry["state_path"] is not None:
            assert read_state(Path(entry["state_path"]))[0] == entry["version"]
        assert Path(entry["uri"]).is_relative_to(home)


def check_counts(disk: Disk) -> None:
    """No sample is counted twice: by id, by micro-batch and by the rows of its version."""
    samples = {sample.sample_id: sample for sample in disk.rows("samples")}
    assert len(samples) == len(disk.rows("samples")), "a sample is sealed twice"
    batches = disk.rows("micro_batches")
    taken = Counter(sample_id for batch in batches for sample_id in batch.sample_ids)
    assert set(taken.values()) <= {1}, f"in two micro-batches: {[s for s, n in taken.items() if n > 1]}"
    applied = {sample_id for sample_id, sample in samples.items() if sample.state == "applied"}
    assert set(taken) == applied, "applied samples and those of the micro-batches differ"
    for batch in batches:
        for sample_id in batch.sample_ids:
            sample = samples[sample_id]
            assert (sample.step, sample.policy) == (batch.step, batch.policy), sample_id
            assert sample.micro_batch_id == batch.micro_batch_id, sample_id
    history: dict[str, list[Any]] = {}
    for row in disk.rows("policy_versions"):
        history.setdefault(row.policy, []).append(row)
    for policy, rows in history.items():
        assert [row.version for row in rows] == list(range(len(rows))), f"versions of {policy} have holes"
        assert [row.parent_version for row in rows] == [None, *range(len(rows) - 1)], f"parents of {policy}"
        for row in rows[1:]:
            mine = [batch for batch in batches if (batch.policy, batch.step) == (policy, row.step)]
            assert {batch.base_version for batch in mine} == {row.parent_version}, record_key(row)
            assert row.num_samples == sum(len(batch.sample_ids) for batch in mine), record_key(row)
            assert row.num_trainable == sum(batch.num_trainable for batch in mine), record_key(row)


def check_same_run(disk: Disk, undisturbed: Disk, home: Path, undisturbed_home: Path) -> None:
    """The finished run equals one that nobody killed: tasks, samples, versions, and the ledger of each step.

    The trainers' weights are sums of all that they consumed: equal digests mean nothing lost, nothing twice.
    """
    assert _tasks(disk) == _tasks(undisturbed), "other tasks were trained"
    assert _samples(disk) == _samples(undisturbed), "other samples were trained"
    assert _ledgers(disk, home) == _ledgers(undisturbed, undisturbed_home), "the ledgers differ"
    left = {table for table, _ in disk.journal}
    assert not left, f"the journal of a finished run holds {left}"
    for folder in (Path("store", "weights"), Path("runs", RUN, "state")):
        left_files = _files(home / folder) - _files(undisturbed_home / folder)
        assert not left_files, f"killed writers left {sorted(left_files)} in {folder}"


def _tasks(disk: Disk) -> Counter[tuple[int, str, str]]:
    return Counter((group.epoch, group.task_id, group.state) for group in disk.rows("groups"))


def _samples(disk: Disk) -> Counter[tuple[Any, ...]]:
    return Counter(
        (s.sample_id, s.step, s.state, s.advantage, s.reward, s.num_tokens, s.version_min)
        for s in disk.rows("samples")
    )


def _ledgers(disk: Disk, home: Path) -> dict[int, str]:
    return {
        step: json.dumps(snapshot["ledger"], sort_keys=True).replace(str(home), "")
        for step, snapshot in disk.snapshots.items()
    }


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
