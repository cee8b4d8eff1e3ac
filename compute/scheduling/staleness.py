"""Lag: how many versions a sample's oldest token is behind the trainer that takes its gradient.

One definition for all that may cause it: tasks dispatched ahead, answers that span an update, several updates
of one batch. It is checked where a sample is consumed.
"""

from __future__ import annotations


def off_policy_steps(trainer_version: int, version_min: int | None) -> int:
    """The trainer's version less the oldest of the sample's; 0 for a sample that no version sampled.

    Raises: ValueError for a sample that is newer than its trainer.
    """
    if version_min is None:
        return 0
    if version_min > trainer_version:
        raise ValueError(
            f"its tokens are of version {version_min} and up, newer than the trainer's version "
            f"{trainer_version}"
        )
    return trainer_version - version_min


def check_lag(
    sample_id: str, *, trainer_version: int, version_min: int | None, max_off_policy_steps: int
) -> None:
    """Refuses a sample whose oldest trainable token is more than the bound behind the trainer.

    Raises: ValueError naming the sample, both versions and the bound if it is too old, or newer than the
        trainer.
    """
    try:
        lag = off_policy_steps(trainer_version, version_min)
    except ValueError as error:
        raise ValueError(f"sample {sample_id}: {error}") from None
    if lag > max_off_policy_steps:
        raise ValueError(
            f"sample {sample_id}: its oldest token is of version {version_min}, the trainer is at version "
            f"{trainer_version}: {lag} off-policy steps, at most {max_off_policy_steps} are allowed"
        )
