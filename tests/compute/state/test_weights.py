"""Weight versions are there whole or not at all, and never change."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megloom.compute.state.weights import (
    DONE_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    WeightManifest,
    WeightsError,
    discard_after,
    discard_states,
    newest_complete,
    put_version,
    read_manifest,
    version_dir,
)


def writing(content: bytes = b"weights", **others: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / MODEL_FILE).write_bytes(content)
        for name, text in others.items():
            (directory / f"{name}.json").write_text(text)

    return write


def put(folder: Path, version: int, content: bytes = b"weights", parent: int | None = None) -> WeightManifest:
    return put_version(
        folder, version, policy="solver", parent_version=parent, write=writing(content, config="{}")
    )


def test_a_version_reads_back_with_its_digest_and_parent(tmp_path: Path) -> None:
    put(tmp_path, 0)
    manifest = put(tmp_path, 1, b"more", parent=0)
    assert read_manifest(version_dir(tmp_path, 1)) == manifest
    assert (manifest.policy, manifest.version, manifest.parent_version) == ("solver", 1, 0)
    assert manifest.size_bytes == 4 and len(manifest.digest) == 64
    assert sorted(path.name for path in (tmp_path / "v000001").iterdir()) == [
        DONE_FILE,
        "config.json",
        MANIFEST_FILE,
        MODEL_FILE,
    ]


def test_the_same_content_again_is_no_change(tmp_path: Path) -> None:
    first = put(tmp_path, 0)
    before = (tmp_path / "v000000" / MODEL_FILE).stat().st_mtime_ns
    assert put(tmp_path, 0) == first
    assert (tmp_path / "v000000" / MODEL_FILE).stat().st_mtime_ns == before


def test_other_content_for_a_complete_version_is_refused(tmp_path: Path) -> None:
    put(tmp_path, 0)
    with pytest.raises(WeightsError, match="refused to replace"):
        put(tmp_path, 0, b"others")
    assert read_manifest(version_dir(tmp_path, 0)).size_bytes == 7


@pytest.mark.parametrize("left", [[], [MODEL_FILE], [MODEL_FILE, MANIFEST_FILE]])
def test_a_version_cut_short_is_ignored_and_then_replaced(tmp_path: Path, left: list[str]) -> None:
    put(tmp_path, 0)
    put(tmp_path, 1)
    for path in (tmp_path / "v000001").iterdir():
        if path.name not in left:
            path.unlink()
    assert newest_complete(tmp_path) == 0
    with pytest.raises(FileNotFoundError):
        read_manifest(version_dir(tmp_path, 1))
    put(tmp_path, 1, b"others")
    assert newest_complete(tmp_path) == 1


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / MODEL_FILE).write_bytes(b"half")
        raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        put_version(tmp_path, 0, policy="solver", parent_version=None, write=fail)
    assert list(tmp_path.iterdir()) == [] and newest_complete(tmp_path) is None


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    put(tmp_path, 0)
    (tmp_path / "v000000" / MODEL_FILE).write_bytes(b"weightS")
    with pytest.raises(WeightsError, match="expected digest"):
        read_manifest(version_dir(tmp_path, 0))
    assert read_manifest(version_dir(tmp_path, 0), verified=False).version == 0


def test_missing_weights_and_a_broken_manifest_are_errors_of_ours(tmp_path: Path) -> None:
    put(tmp_path, 0)
    (tmp_path / "v000000" / MODEL_FILE).unlink()
    with pytest.raises(WeightsError, match="no file"):
        read_manifest(version_dir(tmp_path, 0))
    (tmp_path / "v000000" / MANIFEST_FILE).write_text("{")
    with pytest.raises(WeightsError, match="manifest unreadable"):
        read_manifest(version_dir(tmp_path, 0))


@pytest.mark.parametrize("schema_version", [2, 99, "3", None])
def test_another_schema_is_refused_in_words(tmp_path: Path, schema_version: object) -> None:
    """Versions before 3 had other digests: they would look corrupt."""
    put(tmp_path, 0)
    path = tmp_path / "v000000" / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": schema_version}))
    with pytest.raises(WeightsError, match=f"schema_version {schema_version}, expected 3"):
        read_manifest(version_dir(tmp_path, 0))


def test_the_newest_is_found_by_number_not_by_name(tmp_path: Path) -> None:
    for version in (2, 999_999, 1_000_000):
        put(tmp_path, version)
    (tmp_path / "notes").mkdir()
    assert newest_complete(tmp_path) == 1_000_000
    assert newest_complete(tmp_path / "absent") is None


def test_versions_after_the_committed_one_are_discarded(tmp_path: Path) -> None:
    for version in range(4):
        put(tmp_path, version)
    (tmp_path / "v000003" / DONE_FILE).unlink()
    staging = tmp_path / ".v000004.77.tmp"  # a killed writer's
    staging.mkdir()
    (staging / MODEL_FILE).write_bytes(b"hal")
    assert discard_after(tmp_path, 1) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000000", "v000001"]
    assert discard_after(tmp_path / "absent", 0) == []


def test_states_other_than_the_committed_one_are_discarded(tmp_path: Path) -> None:
    for name in ("s000001", "s000002", "s000003", ".s000004.77.tmp"):
        (tmp_path / name).write_bytes(b"state")
    gone = discard_states(tmp_path, keep=str(tmp_path / "s000002"))
    assert sorted(gone) == [".s000004.77.tmp", "s000001", "s000003"]
    assert [path.name for path in tmp_path.iterdir()] == ["s000002"]
    assert discard_states(tmp_path, keep=None) == ["s000002"]
    assert discard_states(tmp_path / "absent", keep=None) == []


def test_a_state_is_kept_by_its_name_after_the_home_was_moved(tmp_path: Path) -> None:
    states = tmp_path / "moved" / "states"
    states.mkdir(parents=True)
    for name in ("s000001", "s000002"):
        (states / name).write_bytes(b"state")
    assert discard_states(states, keep=["/before/states/s000002"]) == ["s000001"]
    assert [path.name for path in states.iterdir()] == ["s000002"]


def test_a_negative_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="version -1"):
        version_dir(tmp_path, -1)


def test_the_control_plane_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "import megloom.compute.trainers.client, megloom.compute.trainers.protocol\n"
        "import megloom.compute.state.weights, megloom.compute.algorithms.table\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
