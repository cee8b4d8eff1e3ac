"""Who works on which replica of a group: a claim holds one replica for the length of one verb, in order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

CORE = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiter:
    slot: int | None  # None takes any
    granted: asyncio.Future[int]


class Turns:
    """Slot `CORE` is always there, satellites come and go. Who waits is bounded by the lane's verbs."""

    def __init__(self) -> None:
        self._slots = {CORE}
        self._free = {CORE}
        self._waiters: list[_Waiter] = []

    @property
    def is_quiet(self) -> bool:
        """True if nobody holds a slot or waits for one."""
        return self._free == self._slots and not self._waiters

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def num_waiting(self) -> int:
        """How many wait for whichever replica is free first."""
        return sum(waiter.slot is None and not waiter.granted.done() for waiter in self._waiters)

    def add(self, slot: int) -> None:
        """A replica is there, free for whoever waits."""
        self._slots.add(slot)
        self._grant(slot)

    def remove(self, slot: int) -> None:
        """The replica is gone; its holder, if any, need not release it."""
        self._slots.discard(slot)
        self._free.discard(slot)
        for waiter in [waiter for waiter in self._waiters if waiter.slot == slot]:
            self._waiters.remove(waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(LookupError(f"replica {slot} is gone"))

    async def claim(self, slot: int | None = None) -> int:
        """The slot, or the first that is free, when its turn comes; the core if several are.

        Raises: LookupError if the slot is gone.
        """
        if slot is not None and slot not in self._slots:
            raise LookupError(f"replica {slot} is gone")
        free = self._free if slot is None else self._free & {slot}
        if free:
            granted = min(free)
            self._free.remove(granted)
            return granted
        waiter = _Waiter(slot=slot, granted=asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.release(waiter.granted.result())
            raise

    def release(self, slot: int) -> None:
        """Ends a claim; a slot that was removed meanwhile is ignored."""
        if slot in self._slots:
            self._grant(slot)

    def _grant(self, slot: int) -> None:
        for waiter in self._waiters:
            if waiter.slot in (None, slot) and not waiter.granted.done():
                self._waiters.remove(waiter)
                waiter.granted.set_result(slot)
                return
        self._free.add(slot)
