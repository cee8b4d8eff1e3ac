"""The one partition set of all step assets: `<run>:<step>`, the step padded so that text order is step order.

Dagster's partition names are global to the instance and the UI lists them in order of creation, so keys are
added step by step. Never a partition per episode: tens of thousands freeze the UI.
"""

from __future__ import annotations

import dagster as dg

TRAIN_STEP = "train_step"
train_step = dg.DynamicPartitionsDefinition(name=TRAIN_STEP)


def step_key(run: str, step: int) -> str:
    """The partition key of a step. A run name has no ':', so the key splits back without doubt."""
    return f"{run}:{step:06d}"


def split_step_key(key: str) -> tuple[str, int]:
    """The inverse of `step_key`."""
    run, _, step = key.rpartition(":")
    return run, int(step)
