"""The gateway's HTTP front: OpenAI's and Anthropic's routes below each episode's path.

    /r/<run>/e/<episode>/a/<attempt>/v1/{chat/completions, completions, responses, models, tokens,
                                         messages, messages/count_tokens}

`GatewayApp.app` is the guarded ASGI application; `GatewayApp` itself is the `Gateway` that the conductor
asks. A request is the task that its server made for it, and one more that watches for the client's leaving.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from megloom.compute.gateway.bodies import client_gone, read_body, read_object
from megloom.compute.gateway.calls import Calls
from megloom.compute.gateway.dialects import (
    anthropic,
    openai_chat,
    openai_completions,
    openai_responses,
    sse,
    tokens,
)
from megloom.compute.gateway.dialects.dialect import Asked, Head
from megloom.compute.gateway.dialects.errors import CallError, ErrorKind, unsupported
from megloom.compute.gateway.episodes import Episode, Episodes, LiveRequest
from megloom.compute.gateway.guard import EPISODE, EpisodeGuard, send_body, send_error
from megloom.compute.gateway.prompts import Prompts
from megloom.compute.gateway.protocol import (
    Admission,
    CallDesk,
    EpisodeCounts,
    Placement,
    StreamingEngine,
)
from megloom.compute.gateway.sampling import Sampler
from megloom.compute.gateway.streams import STALL_TIMEOUT_S, SentStream, StreamWatch
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.rollout.chat import Chat
from megloom.compute.rollout.protocol import Endpoint
from megloom.compute.store.offload import Offload, ThreadOffload

log = logging.getLogger(__name__)
Parse = Callable[[Mapping[str, Any]], Asked]
Handler = Callable[["_Exchange"], Awaitable[None]]


class GatewayApp:
    """Routes, episodes and calls of one gateway process. `base_url` is where its server listens.

    `clock` gives the wall's seconds that answers carry; deadlines are the event loop's. Use `set_base_url`
    where the port is known only after the server has begun to listen.
    """

    def __init__(
        self,
        *,
        desk: CallDesk,
        engines: Callable[[Placement], StreamingEngine],
        clock: Callable[[], float] = time.time,
        base_url: str = "",
        offload: Offload | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._clock, self._base_url = clock, base_url
        self._streams = StreamWatch(stall_timeout_s=stall_timeout_s)
        self._offload = offload or ThreadOffload("gateway")
        self._templates: dict[str, ChatTemplate] = {}
        self.episodes = Episodes()
        self._prompts = Prompts(self._templates, self._offload)
        self._calls = Calls(desk=desk, sampler=Sampler(desk, engines), prompts=self._prompts)
        posts: dict[str, Handler] = {
            "/v1/chat/completions": partial(self._answer, openai_chat.parse),
            "/v1/completions": partial(self._answer, openai_completions.parse),
            "/v1/responses": partial(self._answer, openai_responses.parse),
            "/v1/tokens": partial(self._answer, tokens.parse),
            "/v1/messages": partial(self._answer, anthropic.parse),
            "/v1/messages/count_tokens": self._count_tokens,
        }
        routes = [Route(path, _Endpoint("POST", handler)) for path, handler in posts.items()]
        routes.append(Route("/v1/models", _Endpoint("GET", self._models)))
        self.router = Router(routes=routes, redirect_slashes=False, default=_unknown_route)
        self.app = EpisodeGuard(self.router, self.episodes)

    def set_base_url(self, base_url: str) -> None:
        """Where clients reach the server, without a path."""
        self._base_url = base_url.rstrip("/")

    async def load_chats(self, directories: Mapping[str, str]) -> None:
        """See `Gateway.load_chats`. Raises: ChatError, FileNotFoundError."""
        for policy, directory in directories.items():
            self._templates[policy] = await self._offload.run(_load_template, directory)

    async def admit(self, admission: Admission) -> Endpoint:
        """See `Gateway.admit`. Raises: ValueError."""
        self.episodes.admit(admission)
        run, episode = quote(admission.run, safe=""), quote(admission.episode_id, safe="")
        url = f"{self._base_url}/r/{run}/e/{episode}/a/{admission.attempt}"
        return Endpoint(openai_url=f"{url}/v1", anthropic_url=url, token=admission.token)

    async def close_episode(self, episode_id: str, attempt: int) -> EpisodeCounts:
        """See `Gateway.close_episode`. Closing again gives the counts again, with those that came late."""
        return await self.episodes.close(episode_id, attempt)

    async def _answer(self, parse: Parse, exchange: _Exchange) -> None:
        """A call in any dialect: parsed, run, and rendered once or event by event."""
        live, body = exchange.live, await exchange.body()
        asked = parse(read_object(body))
        call = asked.call
        self._check(live.episode, asked)
        with _watched(live, exchange.receive):
            prepared = await self._prompts.prepare(live.episode, call, len(body))
            template = prepared.template
            head = Head(
                answer_id=prepared.requests[0].invocation_id,
                created_s=int(self._clock()),
                num_prompt_tokens=len(prepared.prompt_ids),
                token_text=lambda token_id: template.decode_all((token_id,)),
            )
            if call.stream:
                exchange.stream = stream = self._streams.open(asked.stream(head), exchange.send, live.stop)
                try:
                    await stream.close(await self._calls.run(live, prepared, stream))
                finally:
                    self._streams.close(stream)
            else:
                replies = await self._calls.run(live, prepared, None)
                await exchange.answer(asked.render(head, replies))

    async def _count_tokens(self, exchange: _Exchange) -> None:
        body = await exchange.body()
        asked = anthropic.parse(read_object(body))
        num_tokens = await self._prompts.count(exchange.live.episode, asked.call, len(body))
        await exchange.answer(anthropic.token_count(num_tokens))

    async def _models(self, exchange: _Exchange) -> None:
        agents = [
            {"id": agent, "object": "model", "created": 0, "owned_by": "megloom"}
            for agent in exchange.live.episode.admission.agents
        ]
        await exchange.answer({"object": "list", "data": agents})

    def _check(self, episode: Episode, asked: Asked) -> None:
        """Refuses what would falsify the log-probabilities; notes, once per episode, what is ignored."""
        admission = episode.admission
        if asked.truncates and not admission.ignores_truncation:
            name = asked.truncates[0]
            raise unsupported(
                f"{name}: truncated or bent sampling is refused, its log-probabilities are not the policy's; "
                f"agent {asked.call.agent} is sampled from the full distribution",
                name,
            )
        for name in (*asked.ignored, *asked.truncates):
            if episode.note(f"request field {name[:80]} is ignored"):
                log.warning("episode=%s: request field %s is ignored", admission.episode_id, name[:80])


@dataclass(kw_only=True, slots=True)
class _Exchange:
    """A request and how it is answered. The handler sets `stream` when it answers in events."""

    live: LiveRequest
    scope: Scope
    receive: Receive
    send: Send
    stream: SentStream | None = None

    async def body(self) -> bytes:
        return await read_body(self.scope, self.receive)

    async def answer(self, body: dict[str, Any]) -> None:
        await send_body(self.send, 200, sse.encode(body))

    async def fail(self, below: str, failure: CallError) -> None:
        """Tells the failure: as an event where an answer has begun."""
        if failure.kind is ErrorKind.CLIENT_GONE:
            return
        if self.stream is not None and self.stream.is_open:
            await self.stream.fail(failure)
        else:
            await send_error(self.send, below, failure)


class _Endpoint:
    """One route: registers the request with its episode and turns its errors into the path's dialect."""

    def __init__(self, method: str, handler: Handler) -> None:
        self._method, self._handler = method, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        below = scope["path"][len(scope["root_path"]) :]
        if scope["method"] != self._method:
            message = f"{below}: expected {self._method}, got {scope['method']}"
            error = CallError(ErrorKind.WRONG_METHOD, message, allowed=self._method)
            await send_error(send, below, error)
            return
        with scope[EPISODE].request() as live:
            exchange = _Exchange(live=live, scope=scope, receive=receive, send=send)
            failure = await self._handle(exchange, below)
        if failure is not None:
            await exchange.fail(below, failure)

    async def _handle(self, exchange: _Exchange, below: str) -> CallError | None:
        """Answers; returns why it could not."""
        live = exchange.live
        try:
            await self._handler(exchange)
        except CallError as error:
            return error
        except asyncio.CancelledError:
            if live.cause is None:
                raise
            live.take_back()
            return live.cause
        # The boundary of HTTP: whatever breaks, the client gets an answer and the log the rest.
        except Exception:
            log.exception("episode=%s path=%s failed", live.episode.admission.episode_id, below)
            return CallError(ErrorKind.INTERNAL, "the gateway failed; its log says how")
        return None


async def _unknown_route(scope: Scope, receive: Receive, send: Send) -> None:
    below = scope["path"][len(scope["root_path"]) :]
    await send_error(send, below, CallError(ErrorKind.UNKNOWN_ROUTE, f"there is nothing at {below}"))


def _load_template(directory: str) -> ChatTemplate:
    return ChatTemplate(Chat(Path(directory)))


@contextmanager
def _watched(live: LiveRequest, receive: Receive) -> Iterator[None]:
    """Stops the request if its client goes away inside the block."""
    watcher = asyncio.ensure_future(_stop_on_disconnect(live, receive))
    try:
        yield
    finally:
        watcher.cancel()


async def _stop_on_disconnect(live: LiveRequest, receive: Receive) -> None:
    """Consumes the server's messages. Waits for the disconnect. Woken by the server."""
    while (await receive())["type"] != "http.disconnect":
        pass
    live.stop(client_gone())
