"""The prefix index finds exactly what slots hold now."""

from __future__ import annotations

from megloom.compute.engines.prefixes import BLOCK_TOKENS, PrefixIndex, block_hashes


def find(index, tokens):
    return index.find(tokens, block_hashes(tokens))


def test_longest_shared_prefix_is_found_down_to_the_token():
    index = PrefixIndex()
    tokens = list(range(50))
    index.put(3, tokens)
    assert find(index, [*tokens[:40], 99, 98]) == (3, 40)
    assert find(index, tokens) == (3, 50)
    assert find(index, tokens[: BLOCK_TOKENS - 1]) == (0, 0)
    assert find(index, [99, *tokens]) == (0, 0)


def test_overwritten_and_cleared_slots_are_forgotten():
    index = PrefixIndex()
    tokens, others = list(range(32)), list(range(100, 132))
    index.put(1, tokens)
    index.put(1, others)
    assert find(index, tokens) == (0, 0)
    assert find(index, others) == (1, 32)
    index.clear()
    assert find(index, others) == (0, 0)


def test_copied_slot_is_found_after_its_source_was_overwritten():
    index = PrefixIndex()
    tokens = list(range(32))
    index.put(5, tokens)
    index.copy(5, 2)
    index.put(5, [9] * 32)
    assert find(index, tokens) == (2, 32)


def test_hash_collision_is_noticed():
    index = PrefixIndex()
    index.put(1, list(range(16)))
    assert index.find([7] * 16, block_hashes(list(range(16)))) == (0, 0)
