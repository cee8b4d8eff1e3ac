"""Where blocking work runs: a thread in production, inline in simulation. Injected, never imported.

Work submitted by one loop to one instance runs in submission order, one piece at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Offload(Protocol):
    """Runs blocking functions for the event loop."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Returns `fn(*args)`; its exception passes through.

        If the caller is cancelled, work that has begun runs to its end and its result is dropped.
        """
        ...


class ThreadOffload:
    """One dedicated thread, so that what it owns (a SQLite connection) is used by that thread only.

    A context manager: leaving it waits for the work that has begun.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, fn, *args)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class InlineOffload:
    """Runs at once on the caller: no thread, so virtual time stays deterministic."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        return fn(*args)
