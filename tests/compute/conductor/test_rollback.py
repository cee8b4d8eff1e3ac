"""Rollbacks on the real conductor with real files: running, stopped, pinned, pruned, killed at any point."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.conductor.keeping import UnknownVersion
from megloom.compute.conductor.reports import StepReport
from megloom.compute.conductor.rollback import RolledBack, rollback_report
from megloom.compute.conductor.run import RunPaths
from megloom.compute.conductor.session import Session
from megloom.compute.conductor.sessions import UnknownRun, roll_back_on_disk
from megloom.compute.conductor.snapshot import Snapshot
from megloom.compute.conductor.version_services import VersionServices, local_services
from megloom.compute.simulation.backend import Faults
from megloom.compute.simulation.cells import Costs
from megloom.compute.simulation.clock import run_virtual
from megloom.compute.simulation.team import simulated_team
from megloom.compute.state.versions import pin
from megloom.compute.state.weights import (
    MODEL_FILE,
    complete_versions,
    discard_after,
    discard_states,
    read_manifest,
    version_dir,
)
from megloom.compute.store.lineage.diff import lineage_diff
from megloom.compute.store.lineage.run_index import RunIndex
from megloom.compute.store.lineage.versions import VersionGraph
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.sqlite_journal import SqliteJournal
from megloom.compute.store.store import MegStore
from megloom.compute.trainers.protocol import Published
from megloom.compute.workload import Training
from tests.compute.simulation.test_resume import DyingStore
from tests.compute.state.weight_versions import spoil
from tests.kills.cells import FileBackend, read_state
from tests.kills.life import RUN, session_config
from tests.kills.tripwire import Tripwire, wire_the_disk

Act = Callable[[Session], Coroutine[Any, Any, Any]]


def live(
    home: Path,
    steps: int,
    act: Act | None = None,
    *,
    keep_states: int = 1,
    keep_versions: int | None = None,
    engines_per_policy: int = 1,
    make_store: Callable[..., MegStore] = MegStore,
    make_backend: Callable[..., FileBackend] = FileBackend,
    make_services: Callable[..., VersionServices] = local_services,
    events: list[str] | None = None,
) -> Session:
    """One life of a session in virtual time; `act` runs beside it. Its log lines are added to `events`."""
    paths = RunPaths(home=home, run=RUN)
    paths.journal.parent.mkdir(parents=True, exist_ok=True)
    config = session_config(steps, 1)
    config = config.model_copy(
        update={
            "storage": config.storage.model_copy(update={"keep_states": keep_states}),
            "cells": config.cells.model_copy(update={"engines_per_policy": engines_per_policy}),
        }
    )
    paths.config.write_text(config.model_dump_json())

    def discard(policy: str, version: int, states: Any) -> None:
        discard_after(Path(paths.weights(policy)), version)
        discard_states(Path(paths.states(policy)), keep=states)

    async def main() -> Session:
        workload = simulated_team(
            Training.parse(
                {"tasks_per_step": 2, "group_size": 2, "micro_batch_groups": 1, "call_timeout_s": 5}
            )
        )
        for name, policy in workload.policies.items():
            publishing = policy.publishing.model_copy(update={"keep_versions": keep_versions})
            workload.policies[name] = policy.model_copy(update={"publishing": publishing})  # type: ignore[index]
        offload = InlineOffload()
        async with SqliteJournal.open(paths.journal, offload) as journal:
            session = Session(
                config=config,
                backend=make_backend(
                    workload, num_tasks=16, costs=Costs(), faults=Faults(), engine_slots=256
                ),
                store=make_store(root=paths.store_root, journal=journal, offload=offload),
                paths=paths,
                epoch=1,
                wall_time=lambda: "simulated",
                write_events=[].extend if events is None else events.extend,
                discard_uncommitted=discard,
                discard_state=lambda path: Path(path).unlink(missing_ok=True),
                versions=make_services(paths.weights, offload),
            )
            acting = asyncio.ensure_future(act(session)) if act else None
            await session.run()
            if acting is not None:
                await acting
            return session

    return run_virtual(main())


def on_disk(home: Path, policy: str, version: int) -> RolledBack:
    return asyncio.run(roll_back_on_disk(home, RUN, policy, version, wall_time=lambda: "then"))


def newest(home: Path) -> Snapshot:
    reader = MegReader(RunPaths(home=home, run=RUN).store_root)
    return Snapshot.from_json(reader.read_manifest(RUN, reader.sealed_steps(RUN)[-1]).snapshot)


def weights(home: Path, policy: str, version: int) -> str:
    return (version_dir(Path(RunPaths(home=home, run=RUN).weights(policy)), version) / MODEL_FILE).read_text()


def after(step: int, policy: str, version: int, told: list[Any]) -> Act:
    """Asks for a rollback when a step is committed, so in the middle of the next; `told` gets the answer."""

    async def act(session: Session) -> None:
        while not session.steps_after(step - 1) and session.state in ("starting", "running"):
            await session.wait_for_change(after=step - 1, timeout_s=1e6)
        try:
            told.append(await session.roll_back(policy, version))
        except (ValueError, UnknownVersion) as error:
            told.append(error)

    return act


def versions_by_step(reports: list[StepReport], policy: str) -> list[int]:
    return [report.policies[policy].version for report in reports]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that nothing runs any more."""
    home = tmp_path_factory.mktemp("trained")
    assert live(home, 3).failure is None
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path) -> Path:
    """A copy of it. Its ledger names files of the original, which no test changes."""
    shutil.copytree(trained, tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def rolled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, RolledBack]:
    """A run of six steps; in the middle of step 3 somebody asked for solver's version 1."""
    told: list[Any] = []
    session = live(tmp_path_factory.mktemp("rolled"), 6, after(2, "solver", 1, told))
    assert session.failure is None
    return session, told[0]


def test_a_running_session_rolls_back_between_two_steps_and_trains_on(
    rolled: tuple[Session, RolledBack],
) -> None:
    session, done = rolled
    assert (done.step, done.version, done.from_version, done.with_state) == (4, 1, 3, False)
    kinds = [report.kind for report in session.reports]
    assert kinds[done.step] == "rollback" and kinds.count("rollback") == 1 and len(kinds) == 7
    assert versions_by_step(session.reports, "solver") == [0, 1, 2, 3, 1, 4, 5]  # no number twice
    planner = versions_by_step(session.reports, "planner")
    assert planner[3] == planner[4] and planner == sorted(planner)
    assert session.reports[done.step].checks[0].detail == (
        "solver: version 3 to 1, with fresh moments: no state of that version is kept"
    )
    folder = Path(session.paths.weights("solver"))
    shown = session.reports[done.step].policies["solver"]  # what Dagster's policy_version event shows
    assert (shown.version, shown.parent_version, shown.trained, shown.num_samples) == (1, 0, False, 0)
    assert shown.digest == read_manifest(version_dir(folder, 1)).digest
    assert complete_versions(folder) == [0, 1, 2, 3, 4, 5]
    assert read_manifest(version_dir(folder, 4)).parent_version == 1
    assert session.reports[-1].policies["solver"].parent_version == 4


def test_samples_of_the_step_after_a_rollback_come_from_the_old_version(
    rolled: tuple[Session, RolledBack],
) -> None:
    reader = MegReader(rolled[0].paths.store_root)
    samples = reader.read_table(RUN, "samples", steps=[5]).to_pylist()
    assert {sample["version_min"] for sample in samples if sample["policy"] == "solver"} == {1}


def test_lineage_shows_the_parent_that_a_version_was_trained_from(
    rolled: tuple[Session, RolledBack],
) -> None:
    root = rolled[0].paths.store_root
    graph = VersionGraph(RunIndex(root, RUN))
    assert graph.rows["solver", 4].parent_version == 1
    assert [e.source for e in graph.edges["solver", 4] if e.relation == "parent"] == [("solver", 1)]
    between = lineage_diff(root, RUN, ("solver", 4), ("solver", 1)).between
    assert between is not None and (between.earlier, between.num_hops) == ("solver@1", 1)


def test_a_kept_state_comes_back_with_its_version(tmp_path: Path) -> None:
    told: list[Any] = []
    session = live(tmp_path, 5, after(2, "solver", 2, told), keep_states=3)
    assert session.failure is None and told[0].with_state
    assert "with its optimizer state" in session.reports[told[0].step].checks[0].detail
    entry = newest(tmp_path).ledger.policies["solver"]
    assert set(entry.states()) == {4, 3, 2} and all(
        read_state(Path(path))[0] == version for version, path in entry.states().items()
    )


def test_a_pinned_versions_state_and_weights_stay(tmp_path: Path) -> None:
    async def pin_one(session: Session) -> None:
        await session.wait_for_change(after=0, timeout_s=1e6)
        while not session.steps_after(0):
            await session.wait_for_change(after=0, timeout_s=1e6)
        pin(Path(RunPaths(home=tmp_path, run=RUN).weights("solver")), 1)

    session = live(tmp_path, 5, pin_one, keep_versions=2)
    assert session.failure is None
    assert complete_versions(Path(session.paths.weights("solver"))) == [1, 4, 5]
    assert len(complete_versions(Path(session.paths.weights("planner")))) == 2
    assert set(newest(tmp_path).ledger.policies["solver"].states()) == {5, 1}
    assert len(list(Path(session.paths.states("solver")).iterdir())) == 2
    done = on_disk(tmp_path, "solver", 1)
    assert done.with_state
    assert live(tmp_path, 8, keep_versions=2).failure is None


@pytest.mark.parametrize(
    ("policy", "version", "message"),
    [
        ("solver", 9, r"policy solver has no version 9 on the disk \(nearest: 3; it has 4\)"),
        ("solver", -1, "policy solver has no version -1"),
        ("solver", 3, "cannot roll back to version 3 .on version 3, had 0 to 3"),
        ("slover", 1, "unknown policy 'slover' .known: planner, solver, verifier"),
    ],
)
def test_a_rollback_that_cannot_be_is_refused_and_changes_nothing(
    home: Path, policy: str, version: int, message: str
) -> None:
    before = newest(home)
    with pytest.raises((ValueError, UnknownVersion), match=message):
        on_disk(home, policy, version)
    assert newest(home) == before


def test_a_running_session_goes_on_after_a_request_that_was_refused(tmp_path: Path) -> None:
    told: list[Any] = []
    session = live(tmp_path, 4, after(2, "solver", 9, told))
    assert session.failure is None and len(session.reports) == 5
    assert isinstance(told[0], UnknownVersion)


def test_a_damaged_version_is_refused_and_the_intact_one_is_named(home: Path) -> None:
    folder = Path(RunPaths(home=home, run=RUN).weights("solver"))
    spoil(version_dir(folder, 2) / MODEL_FILE, 0)
    with pytest.raises(UnknownVersion, match=r"version 2 cannot be used: .*; version 1 is intact"):
        on_disk(home, "solver", 2)
    with pytest.raises(UnknownRun, match="no run 'x' in .*known: "):
        asyncio.run(roll_back_on_disk(home, "x", "solver", 2, wall_time=str))


def test_a_stopped_run_rolls_back_and_its_next_start_stands_there(tmp_path: Path) -> None:
    assert live(tmp_path, 3).failure is None
    done = on_disk(tmp_path, "solver", 1)
    assert (done.step, done.from_version, done.version) == (4, 3, 1)
    last = newest(tmp_path)
    assert (last.report.kind, last.report.step, last.report.wall_time) == ("rollback", 4, "then")
    assert last.ledger.versions()["solver"] == 1
    session = live(tmp_path, 6)
    assert session.failure is None
    assert versions_by_step(session.reports, "solver") == [0, 1, 2, 3, 1, 4, 5]
    folder = Path(session.paths.weights("solver"))
    assert complete_versions(folder) == [0, 1, 2, 3, 4, 5], "newer versions stay until they are pruned"
    assert on_disk(tmp_path, "solver", 3).from_version == 5, "and one may go forward again"


def test_a_rollback_that_is_asked_for_while_the_session_starts_seals_no_episode_of_the_open_step(
    tmp_path: Path,
) -> None:
    """What a killed session had ended in step 3 was sampled by the version that is left."""
    num_evaluations, num_a_step = 4, 4
    dying = partial(DyingStore, episodes=num_evaluations + 2 * num_a_step + 3)
    assert live(tmp_path, 6, make_store=dying).failure == "StoreError: the session dies here"
    told: list[RolledBack] = []

    async def ask_at_once(session: Session) -> None:
        assert session.state == "starting"
        told.append(await session.roll_back("solver", 1))

    session = live(tmp_path, 6, ask_at_once)
    assert session.failure is None and (told[0].step, told[0].from_version) == (3, 2)
    reader = MegReader(session.paths.store_root)
    sealed = {
        table: reader.read_table(RUN, table, steps=[3]).num_rows for table in ("episodes", "provenance")
    }
    assert sealed == {"episodes": 0, "provenance": 1}, "what made the step stays"
    episodes = reader.read_table(RUN, "episodes", steps=[4, 5]).to_pylist()
    assert len([e for e in episodes if e["purpose"] == "train"]) == 2 * num_a_step
    assert versions_by_step(session.reports, "solver") == [0, 1, 2, 1, 3, 4, 5]


def test_a_rollback_says_that_the_algorithms_running_numbers_begin_anew(trained: Path) -> None:
    without = newest(trained)
    states = {"solver": {"baseline": 0.5, "count": 3.0}}
    carrying = replace(without, ledger=replace(without.ledger, algorithm_states=states))
    to = Published(uri="u1", version=1, digest="d1", size_bytes=1)
    done = RolledBack(run=RUN, policy="solver", step=4, from_version=3, version=1, with_state=False)
    for last, end in (
        (carrying, "; its algorithm begins anew (baseline, count belonged to the line that was left)"),
        (without, "no state of that version is kept"),
    ):
        back = last.ledger.rolled_back("solver", to, parent_version=0)
        report = rollback_report(last, back, done, at_s=0.0, wall_time="then")
        assert report.checks[0].detail.endswith(end)


def test_a_rollback_may_take_the_last_steps_number(tmp_path: Path) -> None:
    told: list[Any] = []
    session = live(tmp_path, 4, after(2, "solver", 2, told))
    assert session.failure is None and [r.kind for r in session.reports][-1] == "rollback"
    assert told[0].step == 4 and session.state == "finished"


def _roll_back_until_killed(home: Path, at: int, place: str) -> None:
    wire_the_disk(Tripwire(at=at, place=place))
    on_disk(home, "solver", 1)


def test_a_rollback_that_is_killed_anywhere_has_happened_or_not(home: Path) -> None:
    """Whatever is on the disk then is one of the two, and the run goes on from it."""
    before = newest(home)
    context = multiprocessing.get_context("fork")
    outcomes, at = set(), 0
    while True:
        copy = home.parent / f"killed{at}"
        shutil.copytree(home, copy)
        process = context.Process(
            target=_roll_back_until_killed, args=(copy, at, "after" if at % 2 else "before")
        )
        process.start()
        process.join()
        now = newest(copy)
        outcomes.add(now.report.kind)
        if now.report.kind == "rollback":
            assert now.ledger.versions()["solver"] == 1
        else:
            assert now == before
            assert on_disk(copy, "solver", 1).version == 1
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
        shutil.rmtree(copy)
        at += 3
    assert outcomes == {"train", "rollback"}
    assert weights(home, "solver", 1) == weights(copy, "solver", 1)
