"""Virtual time: sleeping costs nothing, order is that of the timers, a deadlock is an error."""

from __future__ import annotations

import asyncio

import pytest

from megloom.compute.simulation.clock import DeadlockError, run_virtual


def test_hours_of_sleep_pass_at_once_and_in_order() -> None:
    async def main() -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []

        async def sleeper(hours: int) -> None:
            await asyncio.sleep(3600 * hours)
            seen.append((asyncio.get_running_loop().time(), hours))

        await asyncio.gather(*(sleeper(hours) for hours in (5, 1, 3)))
        return seen

    assert run_virtual(main()) == [(3600.0, 1), (10800.0, 3), (18000.0, 5)]


def test_a_deadline_expires_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 60.0


def test_waiting_for_what_never_comes_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run_virtual(main())
