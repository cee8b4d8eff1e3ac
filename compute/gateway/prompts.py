"""From a request to the tokens of its prompt: histories are asked before a call, and told after it.

Promises: one history per (episode attempt, policy), used by one worker at a time; a long request is rendered
and encoded off the event loop. Called by `calls.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from megloom.compute.gateway.dialects.errors import CallError, ErrorKind, invalid
from megloom.compute.gateway.dialects.openai_messages import reply_message
from megloom.compute.gateway.episodes import Episode
from megloom.compute.gateway.history import History, Matched
from megloom.compute.gateway.protocol import AgentRoute, CallRequest, ChatCall, Reply
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.graph.records import EdgeKind
from megloom.compute.rollout.chat import recorded_messages
from megloom.compute.store.offload import Offload

OFFLOAD_BYTES = 1 << 15  # a body this long may take 10 ms to render and encode: other calls go on meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A request whose prompt is known; one `CallRequest` per choice."""

    call: ChatCall
    policy: str
    template: ChatTemplate
    prompt_ids: tuple[int, ...]
    requests: tuple[CallRequest, ...]
    leaf_class: str
    size_bytes: int


class Prompts:
    """The prompts of all episodes. `templates` are by policy, filled by who owns this."""

    def __init__(self, templates: Mapping[str, ChatTemplate], offload: Offload) -> None:
        self._templates, self._offload = templates, offload

    async def prepare(self, episode: Episode, call: ChatCall, size_bytes: int) -> Prepared:
        """Finds the prompt's tokens and names the calls; `size_bytes` is the body's. Raises: CallError."""
        route = episode.route(call.agent)
        template = self._template(route)
        matched = await self._match(episode, route, template, call, size_bytes)
        if not matched.prompt_ids:
            raise invalid("the prompt has no tokens")
        if matched.kind == "branch":
            episode.num_branches += 1
            episode.note(f"{call.agent}: {matched.reason}"[:200])
        parents: tuple[tuple[str, str], ...] = ()
        if matched.kind == "extends" and matched.parent_invocation is not None:
            parents = ((matched.parent_invocation, EdgeKind.EXTENDS.value),)
        leaf_class = "main"
        if call.messages:
            leaf_class = episode.classifier.classify(call.messages, call.tools, episode.num_classified)
            episode.num_classified += 1
        messages = recorded_messages(call.messages)
        requests = []
        for _ in range(call.n):
            index, invocation_id = episode.new_call()
            requests.append(
                CallRequest(
                    invocation_id=invocation_id,
                    episode_id=episode.admission.episode_id,
                    attempt=episode.admission.attempt,
                    agent=call.agent,
                    index=index,
                    parents=parents,
                    prompt_ids=matched.prompt_ids,
                    messages=messages,
                    max_tokens=min(call.max_tokens or route.max_tokens, route.max_tokens),
                    temperature=route.temperature,
                )
            )
        return Prepared(
            call=call,
            policy=route.policy,
            template=template,
            prompt_ids=matched.prompt_ids,
            requests=tuple(requests),
            leaf_class=leaf_class,
            size_bytes=size_bytes,
        )

    async def count(self, episode: Episode, call: ChatCall, size_bytes: int) -> int:
        """How many tokens the prompt has. No call is made. Raises: CallError."""
        route = episode.route(call.agent)
        matched = await self._match(episode, route, self._template(route), call, size_bytes)
        return len(matched.prompt_ids)

    async def remember(self, episode: Episode, prepared: Prepared, reply: Reply) -> None:
        """The next request may continue this answer."""
        history = episode.histories.get(prepared.policy)
        if history is None or not prepared.call.messages:
            return  # what has no messages cannot be continued by messages
        async with episode.locks[prepared.policy]:
            if prepared.size_bytes < OFFLOAD_BYTES:
                _add(history, prepared.call, reply)
            else:
                await self._offload.run(_add, history, prepared.call, reply)

    def _template(self, route: AgentRoute) -> ChatTemplate:
        template = self._templates.get(route.policy)
        if template is None:
            raise CallError(
                ErrorKind.UNAVAILABLE, f"the chat template of policy {route.policy} is not loaded yet"
            )
        return template

    async def _match(
        self, episode: Episode, route: AgentRoute, template: ChatTemplate, call: ChatCall, size_bytes: int
    ) -> Matched:
        if call.prompt_ids is not None:
            return Matched(prompt_ids=call.prompt_ids, parent_invocation=None, kind="new")
        history = _history(episode, route, template)
        try:
            async with episode.locks[route.policy]:
                if size_bytes < OFFLOAD_BYTES:
                    return _find(history, template, call)
                return await self._offload.run(_find, history, template, call)
        except RecursionError:
            raise invalid("messages or tools are nested too deeply") from None
        except ValueError as error:  # a message or a template that cannot be rendered
            raise invalid(str(error)) from None


def _history(episode: Episode, route: AgentRoute, template: ChatTemplate) -> History:
    if route.policy not in episode.histories:
        episode.histories[route.policy] = History(template)
        episode.locks[route.policy] = asyncio.Lock()
    return episode.histories[route.policy]


def _find(history: History, template: ChatTemplate, call: ChatCall) -> Matched:
    if call.prompt_text is not None:
        ids = template.encode(call.prompt_text)
        return Matched(prompt_ids=ids, parent_invocation=None, kind="new")
    return history.match(call.messages, call.tools)


def _add(history: History, call: ChatCall, reply: Reply) -> None:
    history.add(
        invocation_id=reply.invocation_id,
        messages=call.messages,
        tools=call.tools,
        prompt_ids=reply.prompt_ids,
        sampled_ids=reply.token_ids,
        reply=[reply_message(reply)],
    )
