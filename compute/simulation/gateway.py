"""A modelled gateway: the calls of programs without HTTP and templates, placed and sampled as real ones are.

It speaks to the real conductor's desk; when an engine goes away in the middle of an answer, another goes on
after the tokens so far. Programs find it by the `Switchboard`, which stands for the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from megloom.compute.engines.protocol import EngineUnavailable
from megloom.compute.gateway.protocol import (
    Admission,
    CallDesk,
    CallEnd,
    CallRequest,
    EpisodeCounts,
    GatewayLost,
    NoPlace,
    NotAdmitted,
    Placement,
    Sampled,
)
from megloom.compute.graph.records import EdgeKind
from megloom.compute.rollout.protocol import Endpoint
from megloom.compute.simulation.cells import ModelledEngine


class ConnectionLost(Exception):
    """What a program sees of a gateway that is gone, or that refuses it."""


@dataclass(kw_only=True, slots=True)
class _Episode:
    """What the gateway holds of an attempt. `last` is each agent's newest call with its whole path."""

    admission: Admission
    num_calls: int = 0
    num_failed: int = 0
    last: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    live: set[asyncio.Task[object]] = field(default_factory=set)


class ModelledGateway:
    """A `Gateway`. `die` makes it unreachable; what it held in flight is cancelled."""

    def __init__(
        self, name: str, *, desk: CallDesk, engine_at: Callable[[Placement], ModelledEngine]
    ) -> None:
        self.name, self._desk, self._engine_at = name, desk, engine_at
        self._episodes: dict[str, _Episode] = {}  # by token
        self._dead = False

    async def load_chats(self, directories: Mapping[str, str]) -> None:
        self._reachable()

    async def admit(self, admission: Admission) -> Endpoint:
        self._reachable()
        self._episodes[admission.token] = _Episode(admission=admission)
        return Endpoint(openai_url=self.name, anthropic_url=self.name, token=admission.token)

    async def close_episode(self, episode_id: str, attempt: int) -> EpisodeCounts:
        self._reachable()
        token = next(
            token
            for token, episode in self._episodes.items()
            if (episode.admission.episode_id, episode.admission.attempt) == (episode_id, attempt)
        )
        episode = self._episodes.pop(token)
        for task in episode.live:
            task.cancel()
        await asyncio.sleep(0)
        return EpisodeCounts(
            num_calls=episode.num_calls, num_failed=episode.num_failed, num_unusable=0, num_branches=0, late=0
        )

    def die(self) -> None:
        """From now on nothing answers."""
        self._dead = True
        for episode in self._episodes.values():
            for task in episode.live:
                task.cancel()

    async def call(self, token: str, agent: str, new_ids: tuple[int, ...]) -> tuple[int, ...]:
        """An answer to what the agent said and heard so far and the new tokens.

        Raises: ConnectionLost.
        """
        if self._dead or token not in self._episodes:
            raise ConnectionLost(f"{self.name}: connection refused")
        episode = self._episodes[token]
        task = asyncio.ensure_future(self._answer(episode, agent, new_ids))
        episode.live.add(task)
        task.add_done_callback(episode.live.discard)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            raise ConnectionLost(f"{self.name}: connection reset")
        return task.result()

    async def _answer(self, episode: _Episode, agent: str, new_ids: tuple[int, ...]) -> tuple[int, ...]:
        request = _request(episode, agent, new_ids)
        episode.num_calls += 1
        answer, failure = _Answer(), "its client left"
        try:
            answer.placement = await self._desk.place(request)
            while not answer.reason:
                cause = await self._ask(request, answer)
                if not answer.reason:
                    rid = answer.placement.rid
                    answer.placement = await self._desk.replace(request.invocation_id, rid, cause)
            failure = ""
        except (NotAdmitted, NoPlace) as error:
            failure = str(error)
            raise ConnectionLost(failure) from None
        finally:
            episode.num_failed += bool(failure)
            if not self._dead:  # the dead tell nothing
                await self._desk.end(answer.end(request, failure or None))
        episode.last[agent] = (request.invocation_id, request.prompt_ids + answer.ids)
        return answer.ids

    async def _ask(self, request: CallRequest, answer: _Answer) -> str:
        """Takes what the engine gives; returns why it gave no end, if so."""
        placement = answer.placement
        assert placement is not None
        try:
            pieces = self._engine_at(placement).stream(
                rid=placement.rid,
                prompt_ids=request.prompt_ids + answer.ids,
                max_tokens=request.max_tokens - len(answer.ids),
                temperature=request.temperature,
                seed=placement.seed,
                stop_token_ids=placement.stop_token_ids,
                incremental=True,
            )
            first = len(answer.ids)
            async with aclosing(pieces):
                async for sampled, reason in pieces:
                    answer.add(first, sampled)
                    answer.reason = reason if reason != "abort" else None
        except EngineUnavailable as error:
            return str(error)
        return "the request was aborted"

    def _reachable(self) -> None:
        if self._dead:
            raise GatewayLost(f"{self.name}: connection closed")


@dataclass(kw_only=True, slots=True)
class _Answer:
    """An answer as far as it is; spans count from its first token, whoever sampled it."""

    placement: Placement | None = None
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[tuple[int, int, int], ...] = ()
    reason: str | None = None

    def add(self, first: int, sampled: Sampled) -> None:
        self.ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.spans += tuple((version, first + a, first + b) for version, a, b in sampled.version_spans)

    def end(self, request: CallRequest, failure: str | None) -> CallEnd:
        return CallEnd(
            invocation_id=request.invocation_id,
            rid=self.placement.rid if self.placement else None,
            sampled=Sampled(token_ids=self.ids, logprobs=self.logprobs, version_spans=self.spans),
            finish_reason=self.reason or "",
            text=bytes(self.ids).decode("ascii"),
            failure=failure,
        )


def _request(episode: _Episode, agent: str, new_ids: tuple[int, ...]) -> CallRequest:
    """The agent's next call; it continues the newest one."""
    admission, route = episode.admission, episode.admission.agents[agent]
    parent, history = episode.last.get(agent, ("", ()))
    return CallRequest(
        invocation_id=f"{admission.episode_id}-a{admission.attempt}-g{episode.num_calls:03d}",
        episode_id=admission.episode_id,
        attempt=admission.attempt,
        agent=agent,
        index=episode.num_calls,
        parents=((parent, EdgeKind.EXTENDS.value),) if parent else (),
        prompt_ids=history + new_ids,
        messages=(),
        max_tokens=route.max_tokens,
        temperature=route.temperature,
    )


class Switchboard:
    """The gateways that ever listened, by name; a session's backend adds them."""

    def __init__(self) -> None:
        self._gateways: dict[str, ModelledGateway] = {}

    def add(self, gateway: ModelledGateway) -> None:
        self._gateways[gateway.name] = gateway

    async def call(self, url: str, token: str, agent: str, text: str) -> str:
        """What a program's client library does. Raises: ConnectionLost."""
        return bytes(await self._gateways[url].call(token, agent, tuple(text.encode("ascii")))).decode()
