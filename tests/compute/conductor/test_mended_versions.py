"""A session that goes on mends its damaged versions before an engine starts, or says why it cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.cluster.protocol import ClusterError
from megloom.compute.conductor.events import EventLog
from megloom.compute.conductor.keeping import UnknownVersion
from megloom.compute.conductor.ledger import Committed, Ledger, Reference
from megloom.compute.conductor.restoring import mend_versions
from megloom.compute.conductor.run import RunPaths
from megloom.compute.conductor.session import Session
from megloom.compute.scheduling.cursor import Cursor
from megloom.compute.simulation.cells import ModelledEngine
from megloom.compute.state.weights import (
    MODEL_FILE,
    WeightsError,
    read_manifest,
    repair_version,
    version_dir,
)
from megloom.compute.trainers.protocol import MicroBatch, Published, TrainerError, TrainerPlan
from tests.compute.conductor.test_rollback import live, newest, on_disk, weights
from tests.compute.state.weight_versions import spoil
from tests.kills.cells import FileBackend, FileTrainer, read_state

STEPS = 2


class MendingTrainer(FileTrainer):
    """Writes a damaged version again if it has a state, as the torch trainer does."""

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        folder = Path(weights_uri)
        try:
            read_manifest(folder)
        except WeightsError as damage:
            if state_path is None:
                raise TrainerError(str(damage)) from damage
            _, held = read_state(Path(state_path))
            try:
                repair_version(folder, lambda made: (made / MODEL_FILE).write_text(str(held)) and None)
            except WeightsError as error:
                raise TrainerError(str(error)) from error
        await super().load(weights_uri=weights_uri, state_path=state_path)


class RealisticBackend(FileBackend):
    """An engine whose version is damaged does not start."""

    def _make_trainer(self, name: str, plan: TrainerPlan) -> FileTrainer:
        return MendingTrainer(plan, self._costs)

    async def start_engine(self, name: str, *, policy: str, uri: str, version: int) -> ModelledEngine:
        try:
            read_manifest(Path(uri))
        except WeightsError as error:
            raise ClusterError(f"{name}: {error}") from error
        return await super().start_engine(name, policy=policy, uri=uri, version=version)


def go_on(home: Path, steps: int = STEPS + 2) -> tuple[Session, list[dict[str, Any]]]:
    """The run's next session, and what its log says of versions."""
    lines: list[str] = []
    session = live(home, steps, make_backend=RealisticBackend, events=lines)
    events = [json.loads(line) for line in lines]
    return session, [event for event in events if event["kind"].startswith("version_")]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a run that no session works on."""
    assert live(tmp_path / "home", STEPS).failure is None
    return tmp_path / "home"


def weights_file(home: Path, policy: str, version: int) -> Path:
    return version_dir(Path(RunPaths(home=home, run="killed").weights(policy)), version) / MODEL_FILE


def test_damaged_versions_of_two_policies_are_mended_and_the_run_ends_as_if_they_never_were(
    home: Path, tmp_path: Path
) -> None:
    versions = newest(home).ledger.versions()
    damaged = [weights_file(home, policy, versions[policy]) for policy in ("planner", "solver")]
    for path in damaged:
        spoil(path, 0)
    session, told = go_on(home)
    assert session.failure is None
    straight = live(tmp_path / "straight", STEPS + 2)
    for policy, last in newest(home).ledger.versions().items():
        assert last == straight.reports[-1].policies[policy].version
        assert weights(home, policy, last) == weights(tmp_path / "straight", policy, last)
    assert [(event["kind"], event["policy"], event["version"]) for event in told] == [
        (kind, policy, versions[policy])
        for policy in ("planner", "solver")
        for kind in ("version_damaged", "version_mended")
    ]
    assert [str(path) in event["cause"] for path, event in zip(damaged, told[::2], strict=True)] == [True] * 2


def test_without_a_state_the_session_names_version_file_and_cause_and_the_intact_one(home: Path) -> None:
    assert not on_disk(home, "solver", 1).with_state
    path = weights_file(home, "solver", 1)
    spoil(path, 0)
    before = newest(home)
    session, told = go_on(home, STEPS + 3)
    assert session.state == "failed" and session.failure is not None
    assert session.failure.startswith(
        f"UnknownVersion: policy solver: version 1 cannot be used: {path.parent} cannot be rebuilt: "
        f"{path}: digest "
    )
    assert session.failure.endswith("; version 0 is intact; it is not mended: no trainer state of it is kept")
    assert [event["kind"] for event in told] == ["version_damaged"]
    assert newest(home) == before
    on_disk(home, "solver", 0)  # the remedy
    assert go_on(home, STEPS + 4)[0].failure is None


def test_a_state_of_other_weights_mends_nothing_and_the_session_says_so(home: Path) -> None:
    entry = newest(home).ledger.policies["solver"]
    assert entry.state_path is not None
    path, state = weights_file(home, "solver", entry.version), Path(entry.state_path)
    spoil(path, 0)
    state.write_text(json.dumps({"version": entry.version, "weights": 7}))
    session, _ = go_on(home)
    assert session.failure is not None
    assert f"version {entry.version} cannot be used: {path.parent} " in session.failure
    assert "; it is not mended: " in session.failure
    assert newest(home).ledger.policies["solver"] == entry


class Keeper:
    """Finds every version but the damaged, which a trainer mends with its first verb."""

    def __init__(self, damaged: dict[str, int]) -> None:
        self.damaged = damaged

    async def find(self, policy: str, version: int) -> tuple[Published, int | None]:
        if self.damaged.get(policy) == version:
            raise UnknownVersion(f"{policy}@{version} is damaged")
        return Published(uri="u", version=version, digest="d", size_bytes=1), None


class LazyTrainer:
    """Notes what it was told. `mends` says whether its first verb mends."""

    def __init__(self, policy: str, keeper: Keeper, *, mends: bool = True) -> None:
        self._policy, self._keeper, self._mends = policy, keeper, mends
        self.told: list[Any] = []

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        self.told.append((weights_uri, state_path, reference_uri))

    async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> None:
        assert not batch.rows and not wants
        self.told.append("forward")
        if self._mends:
            del self._keeper.damaged[self._policy]

    async def close(self) -> None:
        self.told.append("close")


def mend(*, mends: bool) -> tuple[dict[str, LazyTrainer], EventLog]:
    def committed(policy: str) -> Committed:
        return Committed(version=2, parent_version=1, uri=policy, digest="d", state_path="s")

    ledger = Ledger(
        next_step=2,
        cursor=Cursor(),
        policies={policy: committed(policy) for policy in ("a", "b")},
        references={"b": Reference(version=2, uri="b")},
    )
    keeper, events = Keeper({"b": 2}), EventLog(lambda: 0.0)
    trainers = {policy: LazyTrainer(policy, keeper, mends=mends) for policy in ledger.policies}
    asyncio.run(mend_versions(ledger, trainers, keeper=keeper, events=events))  # type: ignore[arg-type]
    return trainers, events


def test_a_version_that_is_the_kl_reference_too_is_mended_before_the_reference_is_loaded() -> None:
    """The trainer that mended ends: afterwards all stand on the ledger, without a process."""
    trainers, events = mend(mends=True)
    assert trainers["a"].told == []
    assert trainers["b"].told == [("b", "s", None), "forward", "close", ("b", "s", "b")]
    assert [json.loads(line)["kind"] for line in events.take()] == ["version_damaged", "version_mended"]


def test_a_version_that_is_damaged_still_is_refused() -> None:
    with pytest.raises(UnknownVersion, match="b@2 is damaged"):
        mend(mends=False)
