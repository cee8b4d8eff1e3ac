"""Modelled engines: they take time and tokens as real ones do, and fail when told to.

The cost model is minimal: a call takes a fixed part plus a part per token, stretched by the load of its
engine. All randomness is a function of seeds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from megloom.compute.engines.answers import Piece, Sampled
from megloom.compute.engines.protocol import (
    Completion,
    EngineInfo,
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    PauseMode,
    VersionSpan,
)

VOCABULARY = 128
CONTEXT_LENGTH = 1 << 16
PIECE_TOKENS = 4  # of a streamed answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds of virtual time."""

    call_s: float = 0.02
    prompt_token_s: float = 0.0002
    token_s: float = 0.005
    gradient_token_s: float = 0.0005
    update_s: float = 0.05
    publish_s: float = 0.05
    start_s: float = 1.0
    trainer_start_s: float = 0.1  # through the fork server
    state_s: float = 0.05  # a trainer's state to a file, or from one
    message_s: float = 0.001  # between a workload worker and the conductor, one way


class ModelledEngine:
    """An `Engine`. `die` makes it unreachable; a request for which `hangs` says True never answers."""

    token = ""
    context_length = CONTEXT_LENGTH

    def __init__(
        self,
        cell: str,
        *,
        policy: str,
        version: int,
        slots: int,
        costs: Costs,
        hangs: Callable[[GenerateRequest], bool],
    ) -> None:
        self._cell, self._policy, self._version = cell, policy, version
        self._slots, self._costs, self._hangs = slots, costs, hangs
        self._live: dict[str, asyncio.Future[None]] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._dead = False

    async def generate(self, request: GenerateRequest) -> Completion:
        await self._reachable()
        if max(request.token_ids) >= VOCABULARY:
            raise EngineRefused(f"rid={request.rid}: id outside the vocabulary")
        interrupt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._live[request.rid] = interrupt
        try:
            return await self._sample(request, interrupt)
        finally:
            self._live.pop(request.rid, None)

    @property
    def url(self) -> str:
        return f"sim://{self._cell}"

    async def stream(
        self,
        *,
        rid: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
        incremental: bool,
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as their time comes; those of a dead engine end in the middle."""
        request = GenerateRequest(
            rid=rid,
            token_ids=tuple(prompt_ids),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
            training=True,
        )
        await self._reachable()
        interrupt = self._live[rid] = asyncio.get_running_loop().create_future()
        try:
            await self._running.wait()
            ids, wait_s, token_s = self._draw(request)
            size = PIECE_TOKENS if incremental else len(ids)
            for start in range(0, len(ids), size):
                new = ids[start : start + size]
                timeout = None if self._hangs(request) else wait_s + len(new) * token_s
                done, _ = await asyncio.wait([interrupt], timeout=timeout)
                if done:
                    interrupt.result()
                    yield Sampled(), FinishReason.ABORT.value
                    return
                spans, wait_s = ((self._version, start, start + len(new)),), 0.0
                is_last = start + len(new) == len(ids)
                reason = _reason(request, ids).value if is_last else None
                yield Sampled(token_ids=new, logprobs=tuple(-2.0 for _ in new), version_spans=spans), reason
        finally:
            self._live.pop(rid, None)

    async def abort(self, rid: str) -> None:
        await self._reachable()
        if (interrupt := self._live.get(rid)) is not None and not interrupt.done():
            interrupt.set_result(None)

    async def pause(self, mode: PauseMode) -> None:
        await self._reachable()
        self._running.clear()

    async def resume(self) -> None:
        await self._reachable()
        self._running.set()

    async def load_version(self, model_path: str, version: int, digest: str | None) -> None:
        await self._reachable()
        await asyncio.sleep(self._costs.publish_s)
        self._version = version

    async def info(self) -> EngineInfo:
        await self._reachable()
        return EngineInfo(
            policy=self._policy,
            version=self._version,
            vocab_size=VOCABULARY,
            context_length=CONTEXT_LENGTH,
            incarnation=self._cell,
            paused=not self._running.is_set(),
        )

    async def ready(self) -> bool:
        return not self._dead and self._running.is_set()

    async def close(self) -> None:
        self.die()

    def die(self) -> None:
        """From now on nothing answers; what is in flight fails."""
        self._dead = True
        for interrupt in self._live.values():
            if not interrupt.done():
                interrupt.set_exception(EngineUnavailable(f"{self._cell}: connection reset"))

    async def _reachable(self) -> None:
        if self._dead:
            raise EngineUnavailable(f"{self._cell}: connection refused")

    async def _sample(self, request: GenerateRequest, interrupt: asyncio.Future[None]) -> Completion:
        await self._running.wait()
        version = self._version
        ids, wait_s, token_s = self._draw(request)
        timeout = None if self._hangs(request) else wait_s + len(ids) * token_s
        done, _ = await asyncio.wait([interrupt], timeout=timeout)
        if done:
            interrupt.result()
            return _completion(request, (), version, FinishReason.ABORT)
        return _completion(request, ids, version, _reason(request, ids))

    def _draw(self, request: GenerateRequest) -> tuple[tuple[int, ...], float, float]:
        """What the request samples, the seconds before its first token, and those of each token."""
        dice = random.Random(request.seed)
        num_tokens = min(request.max_tokens, 1 + int(dice.expovariate(1 / 8)))
        load = 1.0 + len(self._live) / self._slots
        wait_s = self._costs.call_s + load * len(request.token_ids) * self._costs.prompt_token_s
        ids = tuple(dice.randrange(48, 58) for _ in range(num_tokens))
        return ids, wait_s, load * self._costs.token_s


def _reason(request: GenerateRequest, ids: tuple[int, ...]) -> FinishReason:
    return FinishReason.STOP if len(ids) < request.max_tokens else FinishReason.LENGTH


def _completion(
    request: GenerateRequest, ids: tuple[int, ...], version: int, reason: FinishReason
) -> Completion:
    spans = (VersionSpan(version=version, start=0, end=len(ids)),) if ids else ()
    return Completion(
        rid=request.rid,
        token_ids=ids,
        logprobs=tuple(-2.0 for _ in ids),
        finish_reason=reason,
        version_spans=spans,
        cached_tokens=0,
    )
