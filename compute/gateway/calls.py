"""The life of a call: its prompt, a place, tokens from one engine or several, its end, the history.

    prepare ──► place ──► sample ──► end ──► remember ──► reply
                  ▲         │ engine went away
                  └─ replace ┘ goes on after the tokens so far

A placed call ends at the desk exactly once, whatever happens: answered, failed, or stopped because its client
went away or its episode is over. The client has the end of its answer when the desk has. Called by `app.py`;
a request with n choices is n calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from megloom.compute.gateway.dialects.errors import CallError, ErrorKind
from megloom.compute.gateway.episodes import Episode, LiveRequest
from megloom.compute.gateway.prompts import Prepared, Prompts
from megloom.compute.gateway.protocol import (
    CallDesk,
    CallEnd,
    CallRequest,
    Delta,
    NoPlace,
    NotAdmitted,
    Reply,
    Sampled,
)
from megloom.compute.gateway.sampling import Placed, Sampler

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a stream's deltas go, by choice."""

    async def grow(self, choice: int, deltas: Callable[[], Sequence[Delta]]) -> None:
        """The answer has grown; it is asked for its deltas when they are written, at once or soon."""
        ...

    async def add(self, choice: int, deltas: Sequence[Delta]) -> None:
        """The last deltas."""
        ...

    async def end(self, choice: int, reply: Reply) -> None:
        """The choice is complete."""
        ...


class Calls:
    """Runs the calls of all episodes."""

    def __init__(self, *, desk: CallDesk, sampler: Sampler, prompts: Prompts) -> None:
        self._desk, self._sampler, self._prompts = desk, sampler, prompts
        self._telling: set[asyncio.Future[None]] = set()

    async def run(self, live: LiveRequest, prepared: Prepared, sink: Sink | None) -> list[Reply]:
        """The replies of all choices, in order; if one fails the others are stopped. Raises: CallError."""
        if len(prepared.requests) == 1:
            return [await self._run_choice(live, prepared, 0, sink)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._run_choice(live, prepared, choice, sink))
                    for choice in range(len(prepared.requests))
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _run_choice(
        self, live: LiveRequest, prepared: Prepared, choice: int, sink: Sink | None
    ) -> Reply:
        request, episode = prepared.requests[choice], live.episode
        episode.num_calls += 1
        placed: Placed | None = None
        try:
            placed = await self._sampler.place(prepared, request)
            incremental = sink is not None or bool(prepared.call.stop)
            pass_on = partial(sink.grow, choice, placed.answer.deltas) if sink is not None else None
            finish_reason = await self._sampler.sample(placed, incremental=incremental, pass_on=pass_on)
            deltas = placed.answer.finish()
            if sink is not None and deltas:
                await sink.add(choice, deltas)
        except BaseException as error:
            episode.num_failed += 1
            # Who stops waiting for a place withdraws the call; one that was refused has nothing to end.
            if placed is not None or isinstance(error, asyncio.CancelledError):
                await self._tell(_failed(request, placed, _cause(error, live)))
            if isinstance(error, NotAdmitted | NoPlace):
                kind = ErrorKind.OVER if isinstance(error, NotAdmitted) else ErrorKind.UNAVAILABLE
                raise CallError(kind, f"{request.invocation_id}: {error}") from None
            raise
        reply = placed.answer.reply(request.invocation_id, prepared.prompt_ids, finish_reason)
        await self._tell(_answered(episode, prepared, placed, finish_reason))
        await self._prompts.remember(episode, prepared, reply)
        if sink is not None:
            await sink.end(choice, reply)
        return reply

    async def _tell(self, end: CallEnd) -> None:
        """Tells the end also if the caller is cancelled meanwhile; then it is told without being awaited."""
        telling = asyncio.ensure_future(self._desk.end(end))
        self._telling.add(telling)
        telling.add_done_callback(self._told)
        try:
            await asyncio.shield(telling)
        except NotAdmitted:
            log.info("invocation=%s ended after its episode", end.invocation_id)

    def _told(self, telling: asyncio.Future[None]) -> None:
        self._telling.discard(telling)
        error = None if telling.cancelled() else telling.exception()
        if error is not None and not isinstance(error, NotAdmitted):
            log.warning("the end of a call was not taken: %s", error)


def _answered(episode: Episode, prepared: Prepared, placed: Placed, finish_reason: str) -> CallEnd:
    answer, request = placed.answer, placed.request
    if answer.unusable is not None:
        episode.num_unusable += 1
        episode.note(f"{request.agent}: {answer.unusable}")
    return CallEnd(
        invocation_id=request.invocation_id,
        rid=placed.placement.rid,
        sampled=answer.sampled,
        finish_reason=finish_reason,
        text=answer.text,
        leaf_class=prepared.leaf_class,
        unusable=answer.unusable,
    )


def _failed(request: CallRequest, placed: Placed | None, failure: str) -> CallEnd:
    return CallEnd(
        invocation_id=request.invocation_id,
        rid=placed.placement.rid if placed is not None else None,
        sampled=Sampled(),
        finish_reason="abort",
        text="",
        failure=failure,
    )


def _cause(error: BaseException, live: LiveRequest) -> str:
    """What the record says of a call that failed."""
    if isinstance(error, asyncio.CancelledError):
        return live.cause.message if live.cause else "another choice failed, or the gateway stops"
    return str(error) or repr(error)
