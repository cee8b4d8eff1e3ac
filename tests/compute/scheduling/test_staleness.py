"""Lag is the trainer's version less that of the sample's oldest token."""

from __future__ import annotations

import pytest

from megloom.compute.scheduling.staleness import check_lag, off_policy_steps


@pytest.mark.parametrize(("trainer", "oldest", "lag"), [(4, 4, 0), (5, 2, 3), (3, None, 0)])
def test_the_lag_counts_from_the_oldest_version(trainer: int, oldest: int | None, lag: int) -> None:
    assert off_policy_steps(trainer, oldest) == lag


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_is_inclusive_and_an_older_sample_is_named(bound: int) -> None:
    check_lag("s", trainer_version=5, version_min=5 - bound, max_off_policy_steps=bound)
    expected = (
        f"sample s: its oldest token is of version {4 - bound}, the trainer is at version 5: "
        f"{bound + 1} off-policy steps, at most {bound} are allowed"
    )
    with pytest.raises(ValueError, match=f"^{expected}$"):
        check_lag("s", trainer_version=5, version_min=4 - bound, max_off_policy_steps=bound)


def test_a_sample_that_no_version_sampled_has_no_lag() -> None:
    check_lag("s", trainer_version=5, version_min=None, max_off_policy_steps=0)


def test_a_sample_of_a_later_version_than_its_trainers_is_refused() -> None:
    expected = "its tokens are of version 6 and up, newer than the trainer's version 5$"
    with pytest.raises(ValueError, match=f"^{expected}"):
        off_policy_steps(5, 6)
    with pytest.raises(ValueError, match=f"^sample s: {expected}"):
        check_lag("s", trainer_version=5, version_min=6, max_off_policy_steps=9)
