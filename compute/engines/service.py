"""Runs a batcher inside an asyncio loop: who waits, who may enter, when the weights may change.

Decode steps run inline in the event loop, between two rounds of I/O: one thread, no lock, no fight for the
interpreter. New requests enter through a gate, which a pause closes, and so does a weight update that waits
for live requests (SGLang's writer priority).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from megloom.compute.engines.batcher import Batcher
from megloom.compute.engines.live_request import LiveRequest
from megloom.compute.engines.model import Weights
from megloom.compute.engines.protocol import FinishReason, PauseMode
from megloom.compute.engines.wire import BadRequest

_MAX_INTAKE_ROUNDS = (
    8  # loop rounds between two steps in which arriving requests may still join the next step
)
_RATE_WINDOW_S = 5.0  # seconds of busy time over which tokens per second are measured


class EngineStopped(Exception):
    """The engine is shutting down or its step loop failed; requests cannot be served any more."""


class EngineService:
    """The engine's state machine. All methods are called from one event loop.

    `read_weights(model_path, digest)` returns verified weights of the served architecture; it blocks and
    runs in a thread.
    """

    def __init__(self, batcher: Batcher, read_weights: Callable[[str, str | None], Weights]) -> None:
        self.paused: PauseMode | None = None
        self.model_path = ""
        self.tokens_per_s = 0.0
        self._batcher = batcher
        self._read_weights = read_weights
        self._futures: dict[str, asyncio.Future[LiveRequest]] = {}
        self._grown: dict[str, asyncio.Event] = {}  # of streamed requests: set when there may be more to send
        self._held: deque[LiveRequest] = deque()  # outside the gate
        self._num_writers = 0
        self._update_lock = asyncio.Lock()  # guards the weights against a second update and a resume
        self._work = asyncio.Event()  # set while a step would make progress
        self._quiet = asyncio.Event()  # set when an update may look again whether it can start
        self._num_arrivals = 0
        self._recent_s = self._recent_tokens = 0.0
        self._failure: BaseException | None = None

    @property
    def version(self) -> int:
        """The version that samples now."""
        return self._batcher.version

    @property
    def num_running(self) -> int:
        """Requests that hold a cache slot."""
        return len(self._batcher.running)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot or behind the gate."""
        return len(self._batcher.waiting) + len(self._held)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since the start."""
        return self._batcher.num_sampled

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be sampled at once."""
        return self.paused is None and self._failure is None

    async def run(self) -> None:
        """The step loop.

        Consumes: requests in the batcher. Waits for: work while not paused. Woken by: `generate`, `resume`.
        """
        try:
            while True:
                await self._work.wait()
                start, num_before = time.perf_counter(), self.num_sampled
                for request in self._batcher.step():
                    self._deliver(request)
                for grown in self._grown.values():
                    grown.set()
                self._update_events()
                await self._take_in()
                self._measure(time.perf_counter() - start, self.num_sampled - num_before)
        except BaseException as error:
            self.stop(error)
            raise

    def _measure(self, elapsed_s: float, num_tokens: int) -> None:
        """Updates the tokens per second of busy time; what is older fades within the window."""
        kept = math.exp(-elapsed_s / _RATE_WINDOW_S)
        self._recent_s = self._recent_s * kept + elapsed_s
        self._recent_tokens = self._recent_tokens * kept + num_tokens
        self.tokens_per_s = self._recent_tokens / self._recent_s

    async def _take_in(self) -> None:
        """Lets the loop do its I/O; goes on while requests keep arriving, so that they share a prefill."""
        for _ in range(_MAX_INTAKE_ROUNDS):
            num_before = self._num_arrivals
            await asyncio.sleep(0)
            if self._num_arrivals == num_before:
                return

    def note_arrival(self) -> None:
        """Tells the step loop that a request is on its way in."""
        self._num_arrivals += 1

    async def generate(self, requests: Sequence[LiveRequest]) -> list[LiveRequest]:
        """Returns the requests when all are finished; cancelling aborts them.

        Raises: BadRequest for a live request id, EngineStopped.
        """
        if self._failure is not None:
            raise EngineStopped(f"engine has stopped: {self._failure!r}")
        for request in requests:
            if request.rid in self._futures:
                raise BadRequest(f"Duplicate request ID detected: {request.rid}")
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        self._num_arrivals += 1
        try:
            for request, future in zip(requests, futures, strict=True):
                self._futures[request.rid] = future
                self._held.append(request)
            self._update_events()
            return [await future for future in futures]
        finally:
            for request in requests:
                if request.finish_reason is None:
                    self.abort(request.rid)
                self._futures.pop(request.rid, None)

    async def stream(self, request: LiveRequest) -> AsyncGenerator[LiveRequest, None]:
        """Yields the request each time it has grown, the last time when it is finished.

        Who takes long between two looks finds more tokens at the next. Leaving the iteration aborts it.

        Raises: BadRequest for a live request id, EngineStopped.
        """
        if request.rid in self._futures or request.rid in self._grown:
            raise BadRequest(f"Duplicate request ID detected: {request.rid}")
        grown = self._grown[request.rid] = asyncio.Event()
        generating = asyncio.ensure_future(self.generate([request]))

        def ended(task: asyncio.Task[list[LiveRequest]]) -> None:
            if not task.cancelled():
                task.exception()  # seen, also if nobody iterates any more
            grown.set()

        generating.add_done_callback(ended)
        num_seen = 0
        try:
            while not generating.done():
                await grown.wait()
                grown.clear()
                if request.finish_reason is None and len(request.output_ids) > num_seen:
                    num_seen = len(request.output_ids)
                    yield request
            yield (await generating)[0]
        finally:
            del self._grown[request.rid]
            generating.cancel()

    def abort(self, rid: str) -> None:
        """Ends a live request with its partial output; unknown ids are ignored."""
        if rid not in self._futures:
            return
        request = next((held for held in self._held if held.rid == rid), None)
        if request is None:
            request = self._batcher.abort(rid)
        else:
            self._held.remove(request)
            request.finish_reason = FinishReason.ABORT
        if request is not None:
            self._deliver(request)
        self._update_events()

    def abort_all(self) -> None:
        """Ends every live request."""
        for rid in list(self._futures):
            self.abort(rid)

    def pause(self, mode: PauseMode) -> None:
        """Stops sampling at once; what happens to live requests is the mode's matter."""
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort_all()
        elif mode is PauseMode.RETRACT:
            self._batcher.retract()
        self._update_events()

    async def resume(self) -> None:
        """Samples again, after a running weight update if there is one."""
        async with self._update_lock:
            self.paused = None
            self._update_events()

    def flush_cache(self) -> bool:
        """Empties the prefix cache, returns False (and does nothing) while requests use it."""
        if self._batcher.running or (self._batcher.waiting and self.paused is not PauseMode.RETRACT):
            return False
        self._batcher.forget_prefixes()
        return True

    async def update_weights(
        self, model_path: str, version: int | None, *, digest: str | None, flush_cache: bool, abort_all: bool
    ) -> int:
        """Replaces the weights, returns how many requests were held by a pause meanwhile.

        While not paused it waits for the live requests to finish, and new ones wait for it. Nothing has
        changed if it raises.

        Raises: ValueError or FileNotFoundError if the folder cannot be loaded, BadRequest.
        """
        if abort_all:
            self.abort_all()
        self._num_writers += 1
        try:
            async with self._update_lock:
                while self.paused is None and self._batcher.busy:
                    self._quiet.clear()
                    await self._quiet.wait()
                self._refuse_stale_cache(flush_cache)
                weights = await asyncio.to_thread(self._read_weights, model_path, digest)
                self._refuse_stale_cache(flush_cache)  # a pause may have come meanwhile
                self._batcher.load(weights, self.version if version is None else version)
                self.model_path = model_path
                return len(self._futures) if self.paused is not None else 0
        finally:
            self._num_writers -= 1
            self._update_events()

    def _refuse_stale_cache(self, flush_cache: bool) -> None:
        # SGLang notices this only after it has replaced the weights
        if flush_cache and self._batcher.running:
            raise BadRequest(
                f"flush_cache is impossible while {len(self._batcher.running)} requests are paused in place; "
                "pass flush_cache=false or pause with retract"
            )

    def stop(self, reason: BaseException) -> None:
        """Refuses new requests; ends live ones by abort if it was cancelled, else by `EngineStopped`."""
        if self._failure is not None:
            return
        self._failure = reason
        if isinstance(reason, asyncio.CancelledError):
            self.abort_all()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(EngineStopped(f"engine has stopped: {reason!r}"))

    def _deliver(self, request: LiveRequest) -> None:
        future = self._futures.get(request.rid)
        if future is not None and not future.done():
            future.set_result(request)

    def _update_events(self) -> None:
        """Opens or shuts the gate, starts or stops the step loop, wakes a waiting update."""
        if self.paused is None and self._num_writers == 0:
            while self._held:
                self._batcher.submit(self._held.popleft())
        if self.paused is None and self._batcher.busy:
            self._work.set()
        else:
            self._work.clear()
            self._quiet.set()
