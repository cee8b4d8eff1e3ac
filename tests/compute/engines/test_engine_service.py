"""The gate, the pauses and the updates of the engine's state machine, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from megloom.compute.engines.protocol import FinishReason, PauseMode
from megloom.compute.engines.service import EngineService, EngineStopped
from megloom.compute.engines.wire import BadRequest


@pytest.fixture
def with_service(model_dir, make_batcher, weights_of):
    """Returns a runner of coroutines that take a service whose step loop is running."""

    def run(scenario):
        async def main():
            service = EngineService(make_batcher(model_dir), lambda path, digest: weights_of(path))
            stepping = asyncio.create_task(service.run())
            try:
                await scenario(service, stepping)
            finally:
                stepping.cancel()
                with contextlib.suppress(asyncio.CancelledError, ZeroDivisionError):
                    await stepping

        asyncio.run(main())

    return run


async def start(service, request, num_tokens=1):
    """Returns the running `generate` task once the request has so many tokens."""
    task = asyncio.create_task(service.generate([request]))
    while len(request.output_ids) < num_tokens:  # noqa: ASYNC110 - turns of the loop are what is counted
        await asyncio.sleep(0)
    return task


async def update(service, folder, version, flush_cache=True):
    return await service.update_weights(
        folder, version, digest=None, flush_cache=flush_cache, abort_all=False
    )


def versions(request):
    return [span.version for span in request.version_spans()]


def test_update_without_a_pause_goes_before_requests_that_come_later(
    with_service, make_live, other_model_dir
):
    async def scenario(service, stepping):
        live, late = make_live(1, [1], max_tokens=40), make_live(2, [2])
        generating = await start(service, live)
        updating = asyncio.create_task(update(service, other_model_dir, 1))
        await asyncio.sleep(0)
        arriving = asyncio.create_task(service.generate([late]))
        await asyncio.gather(generating, updating, arriving)
        assert (versions(live), versions(late)) == ([0], [1])

    with_service(scenario)


def test_pause_during_a_waiting_update_lets_it_start_at_once(with_service, make_live, other_model_dir):
    async def scenario(service, stepping):
        live = make_live(1, [1], max_tokens=60)
        generating = await start(service, live)
        updating = asyncio.create_task(update(service, other_model_dir, 1))
        await asyncio.sleep(0)
        service.pause(PauseMode.RETRACT)
        assert await updating == 1
        assert not generating.done()
        await service.resume()
        await generating
        assert versions(live) == [0, 1]

    with_service(scenario)


def test_resume_waits_for_a_running_update(with_service, make_live, other_model_dir):
    async def scenario(service, stepping):
        live = make_live(1, [1], max_tokens=60)
        generating = await start(service, live, num_tokens=2)
        service.pause(PauseMode.IN_PLACE)
        num_old = len(live.output_ids)
        updating = asyncio.create_task(update(service, other_model_dir, 1, flush_cache=False))
        await asyncio.sleep(0)
        await asyncio.gather(service.resume(), updating, generating)
        assert [(s.version, s.start) for s in live.version_spans()] == [(0, 0), (1, num_old)]

    with_service(scenario)


def test_failed_update_reopens_the_gate(with_service, make_live, tmp_path):
    async def scenario(service, stepping):
        with pytest.raises(FileNotFoundError):
            await update(service, str(tmp_path / "missing"), 1)
        (request,) = await service.generate([make_live(1, [1])])
        assert versions(request) == [0]

    with_service(scenario)


def test_held_request_can_be_aborted_and_its_rid_is_taken_meanwhile(with_service, make_live):
    async def scenario(service, stepping):
        service.pause(PauseMode.IN_PLACE)
        request = make_live(1, [1])
        generating = asyncio.create_task(service.generate([request]))
        await asyncio.sleep(0)
        assert (service.num_running, service.num_queued) == (0, 1)
        with pytest.raises(BadRequest, match="Duplicate"):
            await service.generate([make_live(1, [2])])
        service.abort(request.rid)
        assert (await generating)[0].finish_reason is FinishReason.ABORT
        assert service.num_queued == 0

    with_service(scenario)


def test_cancelled_caller_leaves_nothing_behind(with_service, make_live):
    async def scenario(service, stepping):
        for index in range(50):
            request = make_live(index, [1], max_tokens=1000)
            generating = await start(service, request)
            generating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await generating
        assert (service.num_running, service.num_queued) == (0, 0)

    with_service(scenario)


def test_shutdown_hands_out_partial_outputs(with_service, make_live):
    async def scenario(service, stepping):
        generating = await start(service, make_live(1, [1], max_tokens=1000), num_tokens=3)
        stepping.cancel()
        (request,) = await generating
        assert request.finish_reason is FinishReason.ABORT
        assert len(request.output_ids) >= 3
        with pytest.raises(EngineStopped):
            await service.generate([make_live(2, [1])])

    with_service(scenario)


def test_failing_step_fails_the_requests_and_the_loop(model_dir, make_batcher, make_live):
    async def main():
        batcher = make_batcher(model_dir)
        batcher.step = lambda: 1 // 0
        service = EngineService(batcher, lambda path, digest: None)
        stepping = asyncio.create_task(service.run())
        with pytest.raises(EngineStopped, match="ZeroDivisionError"):
            await service.generate([make_live(1, [1])])
        with pytest.raises(ZeroDivisionError):
            await stepping
        assert not service.ready

    asyncio.run(main())
