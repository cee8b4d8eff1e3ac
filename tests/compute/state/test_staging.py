"""Whole folders of delta versions: rebuilt once, verified, shared, bounded; damage is told and survived."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from megloom.compute.state import staging, weights
from megloom.compute.state.exporting import export_version
from megloom.compute.state.staging import (
    CorruptVersion,
    default_scratch,
    full_folder,
    newest_intact_anchor,
    stage_whole,
    usable_folder,
)
from megloom.compute.state.weights import (
    DELTA_FILE,
    DONE_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    WeightManifest,
    WeightsError,
    file_digest,
    put_version,
    read_manifest,
    repair_version,
    version_dir,
)
from megloom.compute.workload import Publishing
from tests.compute.state.weight_versions import Arrays, arrays, line, moved, put, put_line, spoil, writing


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def test_every_version_of_a_line_comes_back_whole(tmp_path: Path, scratch: Path) -> None:
    manifests = put_line(tmp_path / "w", 6)
    assert [m.base_version for m in manifests] == [None, 0, 0, 0, None, 4]
    for manifest, tensors in zip(manifests, line(6), strict=True):
        version = version_dir(tmp_path / "w", manifest.version)
        folder = full_folder(version, scratch)
        assert (folder == version) is manifest.is_whole
        assert file_digest(folder / MODEL_FILE) == manifest.digest
        assert {"config.json", "tokenizer.json", MANIFEST_FILE, DONE_FILE} < {
            p.name for p in folder.iterdir()
        }
        assert read_manifest(folder).is_whole  # with its digest checked
        loaded = load_file(folder / MODEL_FILE)
        assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)


def test_a_version_is_rebuilt_once(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_line(tmp_path / "w", 2)
    first = full_folder(tmp_path / "w" / "v000001", scratch)
    monkeypatch.setattr(staging, "apply_delta", lambda *_: pytest.fail("rebuilt again"))
    assert full_folder(tmp_path / "w" / "v000001", scratch) == first


def test_the_writer_leaves_a_whole_copy_so_that_nobody_rebuilds(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = line(2)
    put(tmp_path / "w", 0, tensors[0])
    manifest = put(tmp_path / "w", 1, tensors[1], staged=scratch)
    monkeypatch.setattr(staging, "apply_delta", lambda *_: pytest.fail("rebuilt"))
    folder = full_folder(tmp_path / "w" / "v000001", scratch)
    assert file_digest(folder / MODEL_FILE) == manifest.digest
    assert (folder / "tokenizer.json").is_file()
    assert not (tmp_path / "w" / "v000001" / MODEL_FILE).exists()


def test_callers_at_once_share_one_rebuild(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_line(tmp_path / "w", 2)
    built = []
    real = staging.apply_delta

    def counted(*paths: Path) -> object:
        built.append(paths)
        return real(*paths)

    monkeypatch.setattr(staging, "apply_delta", counted)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(full_folder(tmp_path / "w" / "v000001", scratch)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(found) == 8 and len(set(found)) == 1


def _die_in_rebuild(folder: str, scratch: str) -> None:
    def apply_and_die(base: Path, delta: Path, result: Path) -> None:
        result.write_bytes(b"half")
        os._exit(9)

    staging.apply_delta = apply_and_die  # type: ignore[assignment]
    full_folder(Path(folder), Path(scratch))


def test_what_a_killed_process_left_is_built_again(tmp_path: Path, scratch: Path) -> None:
    manifests = put_line(tmp_path / "w", 2)
    version = tmp_path / "w" / "v000001"
    process = multiprocessing.get_context("fork").Process(
        target=_die_in_rebuild, args=(str(version), str(scratch))
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    assert file_digest(full_folder(version, scratch) / MODEL_FILE) == manifests[1].digest


def test_scratch_is_bounded_and_the_newest_two_of_each_policy_stay(tmp_path: Path, scratch: Path) -> None:
    tensors = line(7)
    for policy in ("one", "two"):
        for version in range(7):
            put(tmp_path / policy, version, tensors[version], anchor_every=100)
    for version in range(1, 7):
        full_folder(tmp_path / "one" / f"v{version:06d}", scratch, budget_bytes=1)
        os.utime(
            full_folder(tmp_path / "one" / f"v{version:06d}", scratch, budget_bytes=1) / DONE_FILE,
            (version, version),
        )
    left = [path.name.split("-")[1] for path in sorted(scratch.glob("*-v*"))]
    assert left == ["v000005", "v000006"]
    full_folder(tmp_path / "two" / "v000001", scratch, budget_bytes=1)
    assert len(list(scratch.glob("*-v*"))) == 3


def test_a_corrupt_delta_falls_to_the_newest_anchor_and_says_so(
    tmp_path: Path, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_line(tmp_path / "w", 7)
    spoil(tmp_path / "w" / "v000006" / DELTA_FILE, 30)
    with pytest.raises(
        CorruptVersion, match=r"v000006 cannot be rebuilt: .*newest intact anchor: version 4"
    ) as caught:
        full_folder(tmp_path / "w" / "v000006", scratch)
    assert caught.value.newest_intact == 4
    found = usable_folder(tmp_path / "w" / "v000006", scratch)
    assert (found.folder, found.manifest.version) == (tmp_path / "w" / "v000004", 4)
    assert found.damage is not None and "v000006" in found.damage
    assert "falling back to version 4" in caplog.text
    assert usable_folder(tmp_path / "w" / "v000005", scratch).damage is None


def test_a_damaged_anchor_is_passed_over(tmp_path: Path, scratch: Path) -> None:
    put_line(tmp_path / "w", 7)
    spoil(tmp_path / "w" / "v000004" / MODEL_FILE)
    with pytest.raises(CorruptVersion, match="newest intact anchor: version 0"):
        full_folder(tmp_path / "w" / "v000006", scratch)
    assert newest_intact_anchor(tmp_path / "w", 6) == 0
    spoil(tmp_path / "w" / "v000000" / MODEL_FILE)
    with pytest.raises(CorruptVersion, match="no anchor is intact"):
        usable_folder(tmp_path / "w" / "v000006", scratch)
    shutil.rmtree(tmp_path / "w" / "v000004")
    with pytest.raises(CorruptVersion, match=r"its base .*v000004 is not there"):
        full_folder(tmp_path / "w" / "v000006", scratch)


def test_a_delta_of_another_version_under_this_name_is_noticed(tmp_path: Path, scratch: Path) -> None:
    put_line(tmp_path / "w", 3)
    shutil.copy(tmp_path / "w" / "v000001" / DELTA_FILE, tmp_path / "w" / "v000002" / DELTA_FILE)
    with pytest.raises(CorruptVersion, match="v000002.*turns .* into"):
        full_folder(tmp_path / "w" / "v000002", scratch)


def test_a_corrupt_version_is_repaired_by_a_trainer_that_holds_its_weights(
    tmp_path: Path, scratch: Path
) -> None:
    tensors = line(3)
    manifests = [put(tmp_path / "w", n, value, dtype="bfloat16") for n, value in enumerate(tensors)]
    version = tmp_path / "w" / "v000002"
    spoil(version / DELTA_FILE, 30)
    with pytest.raises(WeightsError, match="not repaired"):
        repair_version(version, writing(arrays(5)))
    repaired = repair_version(version, writing(tensors[2]))
    assert repaired.is_whole and repaired.digest == manifests[2].digest
    assert (repaired.version, repaired.parent_version) == (2, 1)
    assert full_folder(version, scratch) == version
    assert put(tmp_path / "w", 3, moved(tensors[2], 9), dtype="bfloat16").base_version == 2


def with_adapter(tensors: Arrays) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        writing(tensors)(directory)
        (directory / "adapter").mkdir()
        (directory / "adapter" / "adapter_config.json").write_text("{}")

    return write


@pytest.mark.parametrize("staged", [True, False], ids=["left by the writer", "rebuilt"])
def test_a_folder_in_a_version_goes_along(tmp_path: Path, scratch: Path, staged: bool) -> None:
    folder, tensors = tmp_path / "w", line(2)
    put(folder, 0, tensors[0])

    def stage(target: Path, manifest: WeightManifest, source: Path) -> None:
        stage_whole(target, manifest, source, scratch)

    manifest = put_version(
        folder,
        1,
        policy="solver",
        parent_version=0,
        write=with_adapter(tensors[1]),
        publishing=Publishing(anchor_every=4),
        stage=stage if staged else None,
    )
    assert not manifest.is_whole
    whole = full_folder(version_dir(folder, 1), scratch)
    assert (whole / "adapter" / "adapter_config.json").read_text() == "{}"
    size_bytes = export_version(whole, tmp_path / "out")
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()
    assert size_bytes == sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())


def test_the_files_of_a_folder_in_a_version_are_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()

    def sync(path: Path) -> None:
        assert not (tmp_path / "v000000" / DONE_FILE).exists()
        flushed.add(path.name)

    monkeypatch.setattr(weights, "sync", sync)
    put_version(tmp_path, 0, policy="solver", parent_version=None, write=with_adapter(arrays()))
    assert {MODEL_FILE, MANIFEST_FILE, "adapter", "adapter_config.json"} <= flushed


def test_a_repair_brings_a_folder_in_a_version_along(tmp_path: Path) -> None:
    put_version(tmp_path, 0, policy="solver", parent_version=None, write=with_adapter(arrays()))
    shutil.rmtree(tmp_path / "v000000" / "adapter")
    spoil(tmp_path / "v000000" / MODEL_FILE)
    repair_version(tmp_path / "v000000", with_adapter(arrays()))
    assert read_manifest(tmp_path / "v000000")  # with its digest checked
    assert (tmp_path / "v000000" / "adapter" / "adapter_config.json").is_file()


def test_scratch_lies_in_memory_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MEGLOOM_SCRATCH", raising=False)
    assert str(os.getuid()) in default_scratch().name
    monkeypatch.setenv("MEGLOOM_SCRATCH", str(tmp_path))
    assert default_scratch() == tmp_path
