"""OpenAI's chat completions, streamed and not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megloom.compute.gateway.dialects.dialect import EventStream, Head
from megloom.compute.gateway.dialects.errors import unsupported
from megloom.compute.gateway.dialects.fields import Fields, shown
from megloom.compute.gateway.dialects.openai_choices import (
    ChunkStream,
    frame,
    read_sampling,
    usage,
    wants_usage,
)
from megloom.compute.gateway.dialects.openai_messages import (
    read_messages,
    read_tools,
    reply_message,
    tool_call_message,
)
from megloom.compute.gateway.protocol import ChatCall, Delta, Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAsked:
    """A request for chat completions."""

    call: ChatCall
    ignored: tuple[str, ...]
    truncates: tuple[str, ...]
    wants_logprobs: bool
    wants_usage: bool

    def render(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """See `Asked.render`."""
        choices = []
        for index, reply in enumerate(replies):
            logprobs = token_logprobs(reply.token_ids, reply.logprobs, head) if self.wants_logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": {**reply_message(reply), "refusal": None},
                    "logprobs": logprobs,
                    "finish_reason": reply.finish_reason,
                }
            )
        framed = frame(head, self.call, "chat.completion", "chatcmpl")
        return {**framed, "choices": choices, "usage": usage(replies)}

    def stream(self, head: Head) -> EventStream:
        """See `Asked.stream`."""
        return ChatStream(self, head)


class ChatStream(ChunkStream):
    """Chunks of a chat completion."""

    def __init__(self, asked: ChatAsked, head: Head) -> None:
        framed = frame(head, asked.call, "chat.completion.chunk", "chatcmpl")
        super().__init__(framed, ends_with_usage=asked.wants_usage)
        self._asked, self._head = asked, head
        self._num_calls = [0] * asked.call.n

    def open(self) -> bytes:
        """The role of each choice."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self.chunk(index, delta=role, logprobs=None) for index in range(self._asked.call.n))

    def add(self, choice: int, delta: Delta) -> bytes:
        """See `EventStream.add`."""
        content: dict[str, Any] = {}
        if delta.text:
            content["content"] = delta.text
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.tool_call is not None:
            position = self._num_calls[choice]
            self._num_calls[choice] += 1
            content["tool_calls"] = [{"index": position, **tool_call_message(delta.tool_call)}]
        logprobs = None
        if self._asked.wants_logprobs and delta.token_ids:
            logprobs = token_logprobs(delta.token_ids, delta.logprobs, self._head)
        return self.chunk(choice, delta=content, logprobs=logprobs) if content or logprobs else b""

    def end(self, choice: int, reply: Reply) -> bytes:
        """See `EventStream.end`."""
        return self.chunk(choice, reply.finish_reason, delta={}, logprobs=None)


def parse(body: Mapping[str, Any]) -> ChatAsked:
    """Reads a request. Raises: CallError naming the field."""
    fields = Fields(body)
    refuse_formats(fields.any("response_format"), "response_format")
    fields.refuse(("functions", "function_call"), "use tools and tool_choice")
    fields.refuse(("audio",), "audio is not offered")
    tools = read_tools(fields.objects("tools"))
    call = ChatCall(
        agent=fields.agent(),
        messages=read_messages(fields.objects("messages")),
        tools=() if fields.any("tool_choice") == "none" else tools,
        **read_sampling(fields, "max_completion_tokens", "max_tokens"),
    )
    noted = forced_choice(body.get("tool_choice"), ("none", "auto"))
    if body.get("top_logprobs"):
        fields.any("top_logprobs")
        noted += ("top_logprobs",)
    return ChatAsked(
        call=call,
        truncates=fields.truncating(),
        wants_logprobs=fields.flag("logprobs"),
        wants_usage=wants_usage(fields),
        ignored=fields.ignored() + noted,
    )


def forced_choice(choice: Any, free: Sequence[str]) -> tuple[str, ...]:
    """The note that a forced tool choice is not honoured."""
    return () if choice is None or choice in free else ("tool_choice",)


def refuse_formats(given: Any, name: str) -> None:
    """Refuses what only constrained sampling could promise. Raises: CallError."""
    if given is None:
        return
    kind = given.get("type") if isinstance(given, dict) else given
    if kind != "text":
        raise unsupported(
            f"{name}: only text is offered, nothing constrains the sampling; got {shown(kind)}", name
        )


def token_logprobs(token_ids: Sequence[int], logprobs: Sequence[float], head: Head) -> dict[str, Any]:
    """Log-probabilities as chat completions give them; alternatives are not kept."""
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=False):  # an engine may have lost some
        token = head.token_text(token_id)
        content.append(
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        )
    return {"content": content, "refusal": None}
