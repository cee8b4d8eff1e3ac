"""The prompt cursor: every epoch takes each task once, and two integers are the whole state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megloom.compute.scheduling.cursor import Cursor, take


@given(num_tasks=st.integers(1, 30), step=st.integers(1, 40), seed=st.integers(0, 5))
def test_each_epoch_takes_every_task_once(num_tasks: int, step: int, seed: int) -> None:
    ids = [f"t{n}" for n in range(num_tasks)]
    cursor, taken = Cursor(), []
    while cursor.epoch < 2:
        cursor, drawn = take(cursor, step, task_ids=ids, seed=seed)
        taken += drawn
    for epoch in (0, 1):
        assert sorted(task for e, task in taken if e == epoch) == sorted(ids)


@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_the_order_does_not_depend_on_how_it_is_cut(cuts: list[int]) -> None:
    ids = [f"t{n}" for n in range(11)]
    cursor, parts = Cursor(), []
    for num in cuts:
        cursor, drawn = take(cursor, num, task_ids=ids, seed=3)
        parts += drawn
    whole_cursor, whole = take(Cursor(), sum(cuts), task_ids=ids, seed=3)
    assert parts == whole and cursor == whole_cursor


def test_another_epoch_or_seed_has_another_order() -> None:
    ids = [f"t{n}" for n in range(20)]
    _, first = take(Cursor(), 40, task_ids=ids, seed=0)
    _, other = take(Cursor(), 20, task_ids=ids, seed=1)
    assert [t for _, t in first[:20]] != [t for _, t in first[20:]]
    assert [t for _, t in first[:20]] != [t for _, t in other]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        take(Cursor(), 1, task_ids=[], seed=0)
