"""Lists, pins and pruning of a policy's folder."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from megloom.compute.state.staging import full_folder
from megloom.compute.state.versions import list_versions, pin, pinned, prunable, prune, unpin
from megloom.compute.state.weights import (
    DENSE_SHARE,
    MANIFEST_FILE,
    complete_versions,
    discard_after,
    read_manifest,
    version_dir,
)
from tests.compute.state.weight_versions import arrays, line, moved, put, put_line


def test_the_list_tells_kind_size_pins_and_damage(tmp_path: Path) -> None:
    put_line(tmp_path, 3)
    pin(tmp_path, 1)
    (tmp_path / "v000002" / MANIFEST_FILE).write_text("{")
    zero, one, two = list_versions(tmp_path)
    assert zero.manifest is not None and one.manifest is not None
    assert (zero.manifest.is_whole, one.manifest.is_whole) == (True, False)
    assert one.manifest.stored_bytes < 0.2 * one.manifest.size_bytes
    assert [v.is_pinned for v in (zero, one, two)] == [False, True, False]
    assert two.manifest is None and two.damage is not None and "unreadable" in two.damage
    assert list_versions(tmp_path / "absent") == []


def test_pins_are_set_and_lifted_one_by_one(tmp_path: Path) -> None:
    put_line(tmp_path, 3)
    pin(tmp_path, 0)
    pin(tmp_path, 2)
    pin(tmp_path, 2)
    assert pinned(tmp_path) == {0, 2}
    assert unpin(tmp_path, 0) and not unpin(tmp_path, 0)
    assert pinned(tmp_path) == {2}
    with pytest.raises(FileNotFoundError, match="v000009"):
        pin(tmp_path, 9)
    assert complete_versions(tmp_path) == [0, 1, 2] and discard_after(tmp_path, 2) == []


def test_pruning_keeps_the_newest_and_the_anchors_that_they_need(tmp_path: Path) -> None:
    put_line(tmp_path, 11)  # anchors 0, 4, 8
    assert prune(tmp_path, keep=2, needed=[10]) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert complete_versions(tmp_path) == [8, 9, 10]
    assert prune(tmp_path, keep=1, needed=[10]) == [9]
    assert prune(tmp_path, keep=1, needed=[]) == []


def test_pruning_never_takes_pinned_or_committed_versions(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    put_line(tmp_path, 11)
    pin(tmp_path, 2)
    prune(tmp_path, keep=1, needed=[6])
    assert complete_versions(tmp_path) == [0, 2, 4, 6, 8, 10]
    for version in complete_versions(tmp_path):
        full_folder(version_dir(tmp_path, version), tmp_path_factory.getbasetemp() / "scratch-prune")


def test_whatever_is_pruned_what_is_kept_can_be_rebuilt(tmp_path: Path) -> None:
    """Random lines with rollbacks, pins and committed versions."""
    dice = random.Random(7)
    weights = {0: arrays(size=200)}
    put(tmp_path / "w", 0, weights[0])
    committed = 0
    for version in range(1, 40):
        if dice.random() < 0.2:
            committed = dice.choice(complete_versions(tmp_path / "w"))  # a rollback
        weights[version] = moved(weights[committed], version)
        put(tmp_path / "w", version, weights[version], parent=committed, anchor_every=dice.choice([3, 5]))
        committed = version
        if dice.random() < 0.2:
            pin(tmp_path / "w", version)
        keep = dice.randint(1, 4)
        prune(tmp_path / "w", keep=keep, needed=[committed])
        kept = complete_versions(tmp_path / "w")
        assert committed in kept and pinned(tmp_path / "w") <= set(kept) and len(kept) >= min(keep, version)
        for number in kept:
            folder = full_folder(
                version_dir(tmp_path / "w", number), tmp_path / "scratch", budget_bytes=1 << 16
            )
            loaded = load_file(folder / "model.safetensors")
            assert all(np.array_equal(loaded[name], weights[number][name]) for name in loaded), number


def test_a_version_with_an_unreadable_manifest_stays(tmp_path: Path) -> None:
    put_line(tmp_path, 4)
    (tmp_path / "v000001" / MANIFEST_FILE).write_text("{")
    assert prunable(tmp_path, keep=1, needed=[]) == [2]


def test_a_delta_after_a_rollback_has_the_anchor_of_its_own_line(tmp_path: Path) -> None:
    tensors = line(6)
    for version in range(6):
        put(tmp_path, version, tensors[version])
    assert put(tmp_path, 6, moved(tensors[2], 6), parent=2).base_version == 0
    assert put(tmp_path, 7, moved(tensors[5], 7), parent=5).base_version == 4


def test_a_dense_change_is_kept_whole_and_becomes_the_base_of_the_next(tmp_path: Path) -> None:
    put(tmp_path, 0, arrays(0))
    other = {name: -value * np.float32(3.7) + np.float32(1) for name, value in arrays(1).items()}
    dense = put(tmp_path, 1, other)
    assert dense.is_whole and dense.stored_bytes == dense.size_bytes and DENSE_SHARE < 1
    assert put(tmp_path, 2, moved(other, 2)).base_version == 1


def test_a_policy_may_publish_bfloat16(tmp_path: Path) -> None:
    first, second = line(2)
    whole = put(tmp_path, 0, first, dtype="bfloat16")
    delta = put(tmp_path, 1, second, dtype="bfloat16")
    assert whole.size_bytes < 0.6 * put(tmp_path / "x", 0, first).size_bytes
    assert delta.base_version == 0 and read_manifest(tmp_path / "v000001") == delta
    assert '"bfloat16"' in (tmp_path / "v000001" / "config.json").read_text()
