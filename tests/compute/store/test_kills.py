"""The conductor is killed with SIGKILL at any point, resumed, and killed again: nothing is lost or doubled.

The real session with the real journal and real files, on modelled cells in virtual time. What must hold is
said in `tests/kills/disk.py`. A failure prints the orders of all lives that led to it: `Nursery.live` replays
them, and `random_kills` draws them again from the seed.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.kills.history import (
    RESUME_OPERATIONS,
    Undisturbed,
    killed_at,
    random_kills,
    run_through,
    undisturbed,
)
from tests.kills.nursery import Nursery, nursery

STEPS, SEED = 4, 1


@pytest.fixture(scope="module")
def births() -> Iterator[Nursery]:
    with nursery() as started:
        yield started


@pytest.fixture(scope="module")
def measure(births: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(births, tmp_path_factory.mktemp("undisturbed"), steps=STEPS, seed=SEED)


def test_an_undisturbed_run_crosses_an_epoch_and_trains_every_policy(measure: Undisturbed) -> None:
    groups = measure.disk.rows("groups")
    assert Counter(group.epoch for group in groups) == {0: 5, 1: 3}
    versions = measure.disk.rows("policy_versions")
    assert {row.policy for row in versions if row.version} == {"planner", "solver", "verifier"}
    assert {"acknowledge", "link", "fsync", "rename"} <= set(measure.operations)


def test_a_kill_is_a_kill_and_is_told_from_an_end(
    births: Nursery, measure: Undisturbed, tmp_path: Path
) -> None:
    last = len(measure.operations) - 1
    assert len(run_through(births, tmp_path / "in", measure, killed_at((last, "after")))) == 1
    assert len(run_through(births, tmp_path / "out", measure, killed_at((last + 1, "after")))) == 0


def kill_often(births: Nursery, measure: Undisturbed, folder: Path, *, seed: int, num_kills: int) -> None:
    """Runs of consecutive seeds, each killed up to 8 times, until so many kills have happened."""
    survived = 0
    while survived < num_kills:
        home = folder / f"seed{seed}"
        survived += len(run_through(births, home, measure, random_kills(seed, measure, num_kills=8)))
        shutil.rmtree(home)
        seed += 1


def test_twenty_kills_lose_nothing_and_double_nothing(
    births: Nursery, measure: Undisturbed, tmp_path: Path
) -> None:
    kill_often(births, measure, tmp_path, seed=0, num_kills=20)


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing_and_double_nothing(
    births: Nursery, measure: Undisturbed, tmp_path: Path
) -> None:
    kill_often(births, measure, tmp_path, seed=100, num_kills=200)


@pytest.mark.slow
def test_a_kill_at_every_operation_of_a_short_run_is_survived(births: Nursery, tmp_path: Path) -> None:
    short = undisturbed(births, tmp_path / "undisturbed", steps=1, seed=SEED)
    for at, place in every_death(short.operations):
        home = tmp_path / f"{at}-{place}"
        run_through(births, home, short, killed_at((at, place)))
        shutil.rmtree(home)


@pytest.mark.slow
def test_a_resume_that_is_killed_at_every_operation_leaves_the_old_snapshot_valid(
    births: Nursery, measure: Undisturbed, tmp_path: Path
) -> None:
    # The middle of a step: weights are published that no manifest names, and the journal has open rows.
    acknowledged = [at for at, name in enumerate(measure.operations) if name == "acknowledge"]
    first = (acknowledged[-2], "after")
    for at in range(RESUME_OPERATIONS):
        home = tmp_path / f"at{at}"
        run_through(births, home, measure, killed_at(first, (at, "after")))
        shutil.rmtree(home)


def every_death(operations: Sequence[str]) -> Iterator[tuple[int, str]]:
    """After each operation, which is before the next one, and midway in each write. Folders are dull."""
    for at, name in enumerate(operations):
        if name.startswith("write"):
            yield at, "midway"
        if name != "mkdir":
            yield at, "after"
