"""The default tiers of a home, and folders that are nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from megloom.compute.state import tiers
from megloom.compute.state.errors import StateError
from megloom.compute.state.tiers import Tier, TierPlan, local_tiers, own_folder


def test_a_home_has_memory_then_disk_then_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_SMALLEST_TMPFS_BYTES", 1)
    shm = tmp_path / "shm"
    shm.mkdir()
    found = local_tiers(tmp_path / "home", shm=shm, remote_url="s3://bucket/x", disk_budget_bytes=7)
    assert [plan.tier for plan in found] == [Tier.TMPFS, Tier.DISK, Tier.REMOTE]
    assert found[0].budget_bytes and Path(found[0].root).parent == shm and found[1].budget_bytes == 7
    other = local_tiers(tmp_path / "other", shm=shm)
    assert other[0].root != found[0].root, "two homes share no memory"


def test_without_a_usable_tmpfs_the_disk_comes_first(tmp_path: Path) -> None:
    found = local_tiers(tmp_path, shm=tmp_path / "no such folder")
    assert [plan.tier for plan in found] == [Tier.DISK]


def test_a_folder_that_is_a_link_is_refused_and_a_loose_one_is_closed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StateError, match="a link or another user's folder"):
        own_folder(tmp_path / "link")
    own_folder(tmp_path / "real")
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o700


def test_plans_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="keeps no files there"):
        TierPlan(tier=Tier.DEVICE, root="x")
    with pytest.raises(ValueError, match="budget_bytes -1"):
        TierPlan(tier=Tier.DISK, root="x", budget_bytes=-1)
