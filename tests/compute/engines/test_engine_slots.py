"""Slots stay contiguous and the cache keeps its contents when it grows or copies."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megloom.compute.engines.checkpoint import read_config
from megloom.compute.engines.slots import SlotCache, compaction_moves


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_moves_leave_the_survivors_contiguous_and_move_each_at_most_once(case):
    num_live, finished = case
    slots = list(range(num_live))
    moves = compaction_moves(num_live, sorted(finished))
    for source, target in moves:
        assert target in finished and source not in finished
        slots[target] = slots[source]
    survivors = slots[: num_live - len(finished)]
    assert sorted(survivors) == sorted(set(range(num_live)) - finished)
    assert len({source for source, _ in moves}) == len(moves)


def test_growth_keeps_contents_and_fills_with_zeros(model_dir):
    cache = SlotCache(read_config(model_dir), device=torch.device("cpu"), dtype=torch.float32)
    cache.ensure(2, 10)
    cache.keys[:, 1, :, 9] = 3.0
    slots, length = cache.num_slots, cache.length
    cache.ensure(slots + 1, length + 1)
    assert cache.num_slots > slots and cache.length > length
    assert bool((cache.keys[:, 1, :, 9] == 3.0).all())
    assert float(cache.keys.sum()) == 3.0 * cache.keys[:, 1, :, 9].numel()


def test_copies_happen_as_if_all_at_once(model_dir):
    cache = SlotCache(read_config(model_dir), device=torch.device("cpu"), dtype=torch.float32)
    cache.ensure(3, 8)
    for slot in range(3):
        cache.values[:, slot] = float(slot)
    cache.copy([0, 1], [1, 0], 4)
    assert cache.values[0, :2, 0, :5, 0].tolist() == [[1, 1, 1, 1, 0], [0, 0, 0, 0, 1]]
