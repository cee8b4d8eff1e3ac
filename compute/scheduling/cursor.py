"""The order in which a run takes its tasks: epochs, each a seeded shuffle of all of them.

The cursor is two integers, so that a snapshot of it is exact: a resumed run takes the same tasks.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from megloom.compute.graph.seeds import derive_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The next task to take: `offset` < number of tasks, always normalised at an epoch's end."""

    epoch: int = 0
    offset: int = 0


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_tasks: int) -> tuple[int, ...]:
    positions = list(range(num_tasks))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(positions)
    return tuple(positions)


def take(
    cursor: Cursor, num: int, *, task_ids: Sequence[str], seed: int
) -> tuple[Cursor, list[tuple[int, str]]]:
    """Returns the cursor after `num` tasks, and those tasks as (epoch, task_id).

    Raises: ValueError on an empty task list.
    """
    if not task_ids:
        raise ValueError("cannot draw tasks: the dataset is empty")
    taken: list[tuple[int, str]] = []
    epoch, offset = cursor.epoch, cursor.offset
    while len(taken) < num:
        order = _order(seed, epoch, len(task_ids))
        taken.append((epoch, task_ids[order[offset]]))
        offset += 1
        if offset == len(task_ids):
            epoch, offset = epoch + 1, 0
    return Cursor(epoch=epoch, offset=offset), taken
