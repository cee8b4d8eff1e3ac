from __future__ import annotations

import asyncio
import threading

import pytest

from megloom.compute.store.offload import InlineOffload, Offload, ThreadOffload


def test_a_thread_offload_runs_all_its_work_on_one_thread_that_is_not_the_callers() -> None:
    async def main() -> set[int]:
        with ThreadOffload("store") as offload:
            return set(await asyncio.gather(*(offload.run(threading.get_ident) for _ in range(8))))

    threads = asyncio.run(main())
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_work_runs_in_the_order_in_which_it_was_submitted() -> None:
    done: list[int] = []

    async def main() -> None:
        with ThreadOffload("store") as offload:
            await asyncio.gather(*(offload.run(done.append, number) for number in range(50)))

    asyncio.run(main())
    assert done == list(range(50))


def test_inline_work_runs_at_once_on_the_callers_thread() -> None:
    assert asyncio.run(InlineOffload().run(threading.get_ident)) == threading.get_ident()


@pytest.mark.parametrize("offload", [ThreadOffload("store"), InlineOffload()], ids=["thread", "inline"])
def test_an_exception_reaches_the_caller(offload: Offload) -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(offload.run(divmod, 1, 0))


def test_leaving_a_thread_offload_waits_for_the_work_that_has_begun() -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        done.wait(timeout=5)
        finished.append(True)

    finished: list[bool] = []

    async def main() -> None:
        with ThreadOffload("store") as offload:
            task = asyncio.create_task(offload.run(work))
            await asyncio.sleep(0)
            assert begun.wait(timeout=5)
            task.cancel()
            done.set()

    asyncio.run(main())
    assert finished == [True]
