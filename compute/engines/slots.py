"""The key-value cache: one row ("slot") per live sequence, live slots always first.

Keeping the live slots contiguous lets a decode step read the cache as one plain slice, without gathering.
Shapes: L layers, N slots, K key-value heads, T cached positions, D head dim.
Only the batcher calls this module; it owns the meaning of each slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megloom.compute.engines.checkpoint import ModelConfig

LENGTH_MULTIPLE = 32  # positions; decode reads slices of this granularity, so shapes seldom change


def round_up(length: int, multiple: int = LENGTH_MULTIPLE) -> int:
    """Returns the smallest multiple that is not below `length`."""
    return -(-length // multiple) * multiple


def compaction_moves(num_live: int, finished: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the (source, target) slots that fill the holes which `finished` leaves among the live slots.

    Every move takes a surviving slot from behind the new end to a hole before it, so that no source is a
    target and each survivor moves at most once.
    """
    gone = set(finished)
    num_left = num_live - len(gone)
    holes = sorted(slot for slot in gone if slot < num_left)
    survivors = [slot for slot in range(num_left, num_live) if slot not in gone]
    return list(zip(survivors, holes, strict=True))


class SlotCache:
    """Keys and values `[L, N, K, T, D]`; grows geometrically in slots and positions up to its needs.

    Positions that were never written hold zeros: attention multiplies masked values by zero, and
    uninitialised memory may hold NaN. With `keys_by_channel` the keys' memory is `[L, N, K, D, T]`.
    """

    def __init__(
        self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, keys_by_channel: bool = False
    ) -> None:
        self._shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        self._device, self._dtype = device, dtype
        self._keys_by_channel = keys_by_channel
        self.keys = self._zeros(0, 0)
        self.values = self._zeros(0, 0)

    def _zeros(self, num_slots: int, length: int) -> torch.Tensor:
        layers, heads, dim = self._shape
        return torch.zeros((layers, num_slots, heads, length, dim), device=self._device, dtype=self._dtype)

    @property
    def num_slots(self) -> int:
        """Slots that fit without growing."""
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        """Positions per slot that fit without growing."""
        return self.keys.shape[3]

    def ensure(self, num_slots: int, length: int) -> None:
        """Grows the cache, at least by half of each too small dimension, to hold so much; keeps contents."""
        if num_slots <= self.num_slots and length <= self.length:
            return
        slots = self.num_slots if num_slots <= self.num_slots else max(num_slots, self.num_slots * 3 // 2, 16)
        grown = round_up(max(length, self.length * 3 // 2, 64))
        positions = self.length if length <= self.length else grown
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = self._zeros(slots, positions)
            if self._keys_by_channel and name == "keys":
                new = new.view(*new.shape[:3], new.shape[4], new.shape[3]).transpose(3, 4)
            new[:, : old.shape[1], :, : old.shape[3]] = old
            setattr(self, name, new)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copies the first `length` positions of slots to other slots, as if all at once."""
        source = torch.tensor(sources, device=self._device)
        target = torch.tensor(targets, device=self._device)
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]
