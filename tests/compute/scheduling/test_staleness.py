"""Lag is the trainer's version less that of the sample's oldest token."""

from __future__ import annotations

import pytest

from megloom.compute.scheduling.staleness import check_lag, off_policy_steps


@pytest.mark.parametrize(("trainer", "oldest", "lag"), [(4, 4, 0), (5, 2, 3), (3, None, 0)])
def test_the_lag_counts_from_the_oldest_version(trainer: int, oldest: int | None, lag: int) -> None:
    assert off_policy_steps(trainer, oldest) == lag


def test_a_sample_within_the_bound_passes_and_an_older_one_is_named() -> None:
    assert check_lag("s", trainer_version=5, version_min=4, max_off_policy_steps=1) == 1
    with pytest.raises(
        ValueError, match="sample s: oldest token of version 3, .* 2 steps off policy, at most 1"
    ):
        check_lag("s", trainer_version=5, version_min=3, max_off_policy_steps=1)


def test_a_sample_of_a_later_version_than_its_trainers_is_refused() -> None:
    with pytest.raises(ValueError, match="sample s: sampled by version 6, trainer at version 5"):
        check_lag("s", trainer_version=5, version_min=6, max_off_policy_steps=9)
