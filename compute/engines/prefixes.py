"""Finds the slot whose cached tokens share the longest prefix with a new prompt.

Owns which tokens each slot's keys and values stand for. An entry lives as long as its slot is neither
overwritten nor cleared; the batcher clears all of them with every change of weights, so that keys of one
policy version never serve another. Prefixes are found by chained hashes of whole blocks and then compared
token by token: a hash collision costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence

BLOCK_TOKENS = 16  # shorter shared prefixes cost less to compute than to find


def block_hashes(token_ids: Sequence[int]) -> list[int]:
    """Returns, for each whole block, a hash of all tokens up to the block's end."""
    hashes = []
    chained = 0
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        chained = hash((chained, tuple(token_ids[end - BLOCK_TOKENS : end])))
        hashes.append(chained)
    return hashes


class PrefixIndex:
    """Slot → cached tokens and back. Written by the batcher only."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # block hash → slot
        self._cached: dict[int, tuple[Sequence[int], list[int]]] = {}  # slot → its tokens, their hashes

    def put(self, slot: int, token_ids: Sequence[int]) -> None:
        """Records that the slot now holds exactly these tokens."""
        self.drop(slot)
        hashes = block_hashes(token_ids)
        self._cached[slot] = (token_ids, hashes)
        for block in hashes:
            self._slots[block] = slot

    def drop(self, slot: int) -> None:
        """Forgets what the slot held."""
        _, hashes = self._cached.pop(slot, ((), []))
        for block in hashes:
            if self._slots.get(block) == slot:
                del self._slots[block]

    def copy(self, source: int, target: int) -> None:
        """Records that the target slot now holds what the source holds."""
        self.drop(target)
        entry = self._cached.get(source)
        if entry is not None:
            self._cached[target] = entry
            self._slots.update(dict.fromkeys(entry[1], target))

    def clear(self) -> None:
        """Forgets everything."""
        self._slots.clear()
        self._cached.clear()

    def find(self, token_ids: Sequence[int], hashes: Sequence[int]) -> tuple[int, int]:
        """Returns (slot, number of leading tokens of `token_ids` that it holds); (0, 0) if none.

        `hashes` are the block hashes of `token_ids`.
        """
        slot, num_shared = 0, 0
        for count, block in enumerate(hashes, start=1):
            found = self._slots.get(block)
            if found is None:
                break
            slot, num_shared = found, count * BLOCK_TOKENS
        if num_shared == 0:
            return 0, 0
        cached = self._cached[slot][0]
        if list(cached[:num_shared]) != list(token_ids[:num_shared]):
            return 0, 0
        limit = min(len(cached), len(token_ids))
        while num_shared < limit and cached[num_shared] == token_ids[num_shared]:
            num_shared += 1
        return slot, num_shared
