"""Asks engines for one answer until it is whole: where one goes away the next goes on after its tokens.

Promises: no token is asked for twice or lost; what an engine has told stays told, also to a client that reads
along; an engine's request ends when its answer is no longer wanted. Called by `calls.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from megloom.compute.engines.protocol import EngineError, EngineRefused, EngineUnavailable, FinishReason
from megloom.compute.gateway.answers import GrowingAnswer
from megloom.compute.gateway.dialects.errors import CallError, ErrorKind, invalid
from megloom.compute.gateway.prompts import Prepared
from megloom.compute.gateway.protocol import (
    CallDesk,
    CallRequest,
    Placement,
    Sampled,
    StreamingEngine,
)
from megloom.compute.gateway.tool_calls import AnswerParser

log = logging.getLogger(__name__)
MAX_PLACES = 8  # of one call; the conductor gives up earlier, this ends a loop if it does not
Pieces = AsyncIterator[tuple[Sampled, str | None]]
PassOn = Callable[[], Awaitable[None]]  # called when the answer has grown


@dataclass(kw_only=True, slots=True)
class Placed:
    """A call that has a place. The sampler changes `placement` when an engine goes away."""

    request: CallRequest
    placement: Placement
    answer: GrowingAnswer
    prompt_field: str
    num_places: int = 1


class Sampler:
    """Places calls and reads their answers."""

    def __init__(self, desk: CallDesk, engines: Callable[[Placement], StreamingEngine]) -> None:
        self._desk, self._engines = desk, engines

    async def place(self, prepared: Prepared, request: CallRequest) -> Placed:
        """A place for the call. Raises: NotAdmitted, NoPlace."""
        placement = await self._desk.place(request)
        max_tokens = request.max_tokens
        if placement.context_length is not None:
            max_tokens = min(max_tokens, placement.context_length - len(request.prompt_ids))
        answer = GrowingAnswer(
            prepared.template,
            stops=prepared.call.stop,
            stop_token_ids=placement.stop_token_ids,
            max_tokens=max_tokens,
            parser=_parser(prepared, request),
        )
        return Placed(
            request=request,
            placement=placement,
            answer=answer,
            prompt_field=prepared.call.prompt_field,
        )

    async def sample(self, placed: Placed, *, incremental: bool, pass_on: PassOn | None) -> str:
        """Samples the whole answer; returns its finish reason, stop or length.

        Raises: CallError, NotAdmitted, NoPlace.
        """
        answer, placement = placed.answer, placed.placement
        if answer.max_tokens < 1:
            assert placement.context_length is not None
            raise too_long(len(placed.request.prompt_ids), placement.context_length, placed.prompt_field)
        while True:
            answer.begin_request()
            try:
                finish_reason = await self._read(placed, incremental=incremental, pass_on=pass_on)
                cause = f"engine {placed.placement.engine} ended the request without an answer"
            except EngineUnavailable as error:
                finish_reason, cause = answer.is_complete(), str(error)
            except EngineRefused as error:
                raise _refused(error, placed.prompt_field) from None
            except EngineError as error:
                raise CallError(ErrorKind.ENGINE_FAILED, str(error)) from None
            if finish_reason is not None:
                return finish_reason
            await self._replace(placed, cause)

    async def _read(self, placed: Placed, *, incremental: bool, pass_on: PassOn | None) -> str | None:
        """Reads one engine's answer; None if the engine ended it without being asked to."""
        answer, placement = placed.answer, placed.placement
        pieces: Pieces = self._engines(placement).stream(
            rid=placement.rid,
            prompt_ids=placed.request.prompt_ids + answer.token_ids,
            max_tokens=answer.num_left,
            temperature=placed.request.temperature,
            seed=placement.seed,
            stop_token_ids=placement.stop_token_ids,
            incremental=incremental,
        )
        try:
            async for sampled, finish_reason in pieces:
                answer.take(sampled)
                if pass_on is not None:
                    await pass_on()
                if answer.stop_text is not None:
                    return FinishReason.STOP.value
                if finish_reason is not None and finish_reason != FinishReason.ABORT:
                    return finish_reason
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()  # ends the request at the engine, if it is not over
        return answer.is_complete()

    async def _replace(self, placed: Placed, cause: str) -> None:
        if placed.num_places >= MAX_PLACES:
            raise CallError(ErrorKind.ENGINE_FAILED, f"{MAX_PLACES} engines went away, the last: {cause}")
        placed.num_places += 1
        old = placed.placement
        log.warning("invocation=%s engine=%s went away: %s", old.invocation_id, old.engine, cause)
        placed.placement = await self._desk.replace(old.invocation_id, old.rid, cause)


def _parser(prepared: Prepared, request: CallRequest) -> AnswerParser | None:
    """Who finds thinking and tool calls; nobody where the client sent no messages."""
    call = prepared.call
    if not call.messages:
        return None
    return AnswerParser(
        request.invocation_id,
        in_reasoning=prepared.template.opens_reasoning,
        has_tools=bool(call.tools),
    )


def too_long(num_tokens: int, context_length: int, prompt_field: str) -> CallError:
    """The prompt leaves no room. Worded so that programs know it from either provider."""
    return CallError(
        ErrorKind.TOO_LONG,
        f"prompt is too long: {num_tokens} tokens > {context_length} maximum. "
        f"This model's maximum context length is {context_length} tokens.",
        param=prompt_field,
    )


def _refused(error: EngineRefused, prompt_field: str) -> CallError:
    """Engines refuse by text; those that speak of the context mean its length."""
    message = str(error)
    if "context" in message:
        return CallError(
            ErrorKind.TOO_LONG,
            f"prompt is too long for this model's maximum context length: {message}",
            param=prompt_field,
        )
    return invalid(message)
