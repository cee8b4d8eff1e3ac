"""SIGKILL at any disk operation of a publish, a pruning or a repair: what was valid stays valid."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megloom.compute.state.staging import full_folder
from megloom.compute.state.versions import prune
from megloom.compute.state.weights import (
    DELTA_FILE,
    MODEL_FILE,
    WeightsError,
    complete_versions,
    discard_after,
    file_digest,
    read_manifest,
    repair_version,
    version_dir,
)
from tests.compute.state.weight_versions import line, put, put_line, spoil, writing
from tests.kills.tripwire import Tripwire, wire_the_disk

Work = Callable[[Path], object]


def _until_killed(work: Work, folder: Path, at: int, place: str) -> None:
    wire_the_disk(Tripwire(at=at, place=place))
    work(folder)


def kills(work: Work, prepared: Path, tmp_path: Path) -> list[Path]:
    """The folder after a death at every third of the work's disk operations, and at last after none."""
    context = multiprocessing.get_context("fork")
    left, at = [], 0
    while True:
        folder = tmp_path / f"dead{at}" / "w"
        shutil.copytree(prepared, folder)
        place = "before" if at % 2 else "after"
        process = context.Process(target=_until_killed, args=(work, folder, at, place))
        process.start()
        process.join()
        left.append(folder)
        if process.exitcode == 0:
            return left
        assert process.exitcode == -9
        at += 3


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Versions 0 to 3 with anchors 0 and 2."""
    put_line(tmp_path / "prepared", 4, anchor_every=2)
    return tmp_path / "prepared"


def intact(folder: Path, scratch: Path) -> dict[int, str]:
    """The digest of each complete version, rebuilt."""
    return {
        version: file_digest(full_folder(version_dir(folder, version), scratch) / MODEL_FILE)
        for version in complete_versions(folder)
    }


def test_a_publish_that_is_killed_anywhere_leaves_the_old_versions_and_may_be_done_again(
    prepared: Path, tmp_path: Path
) -> None:
    weights, scratch = line(6)[5], tmp_path / "scratch"
    before = intact(prepared, scratch)
    outcomes = set()
    for folder in kills(
        lambda at: put(at, 5, weights, parent=3, anchor_every=2, staged=tmp_path / "s"), prepared, tmp_path
    ):
        now = intact(folder, scratch)
        assert {version: now[version] for version in before} == before
        outcomes.add(5 in now)
        discard_after(folder, 3)  # what a resume does
        assert complete_versions(folder) == [0, 1, 2, 3] and not list(folder.glob(".*"))
        manifest = put(folder, 5, weights, parent=3, anchor_every=2)
        assert manifest.base_version == 2 and intact(folder, scratch)[5] == manifest.digest
    assert outcomes == {True, False}


def test_a_pruning_that_is_killed_anywhere_leaves_what_can_be_rebuilt(prepared: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    before = intact(prepared, scratch)
    for folder in kills(lambda at: prune(at, keep=1, needed=[3]), prepared, tmp_path):
        for path in scratch.glob("*-v*"):
            shutil.rmtree(path)
        now = intact(folder, scratch)
        assert now.items() <= before.items() and {2, 3} <= set(now)
        prune(folder, keep=1, needed=[3])
        assert complete_versions(folder) == [2, 3]


def test_a_repair_that_is_killed_anywhere_may_be_done_again(prepared: Path, tmp_path: Path) -> None:
    """The version is there all the time: damaged or mended, never gone and never with other weights."""
    weights, scratch = line(4)[3], tmp_path / "scratch"
    digest = read_manifest(version_dir(prepared, 3)).digest
    spoil(version_dir(prepared, 3) / DELTA_FILE, 30)

    def mend(folder: Path) -> None:
        repair_version(version_dir(folder, 3), writing(weights))

    outcomes = set()
    for folder in kills(mend, prepared, tmp_path):
        try:
            assert file_digest(full_folder(version_dir(folder, 3), scratch) / MODEL_FILE) == digest
            outcomes.add("mended")
        except WeightsError:
            outcomes.add("damaged")
        mend(folder)
        assert intact(folder, scratch)[3] == digest
        assert not (version_dir(folder, 3) / DELTA_FILE).exists()
    assert outcomes == {"mended", "damaged"}


def test_a_repair_of_an_anchor_that_is_killed_anywhere_may_be_done_again(
    prepared: Path, tmp_path: Path
) -> None:
    """Deltas of the anchor can be rebuilt again as well."""
    weights, scratch = line(4)[2], tmp_path / "scratch"
    before = {version: read_manifest(version_dir(prepared, version)).digest for version in range(4)}
    spoil(version_dir(prepared, 2) / MODEL_FILE)

    def mend(folder: Path) -> None:
        repair_version(version_dir(folder, 2), writing(weights))

    for folder in kills(mend, prepared, tmp_path):
        assert complete_versions(folder) == [0, 1, 2, 3]
        mend(folder)
        assert intact(folder, scratch) == before
