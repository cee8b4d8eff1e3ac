"""Anthropic's messages, streamed and not, and the counting of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from megloom.compute.gateway.dialects import sse
from megloom.compute.gateway.dialects.anthropic_messages import read_conversation, read_tools
from megloom.compute.gateway.dialects.dialect import EventStream, Head
from megloom.compute.gateway.dialects.errors import CallError, anthropic_error, invalid, unsupported
from megloom.compute.gateway.dialects.fields import Fields, kind_of
from megloom.compute.gateway.protocol import ChatCall, Delta, Reply, ToolCall

_NEVER_SIGNED = ""  # thinking is not verified when it comes back: the history knows its own tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class MessagesAsked:
    """A request for a message."""

    call: ChatCall
    ignored: tuple[str, ...]
    truncates: tuple[str, ...]

    def render(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """See `Asked.render`."""
        (reply,) = replies
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": _NEVER_SIGNED})
        if reply.text or not reply.tool_calls:
            content.append({"type": "text", "text": reply.text})
        content += [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _arguments(call)}
            for call in reply.tool_calls
        ]
        return {
            **_message(head, self.call.agent, _usage(reply)),
            "content": content,
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop_text,
        }

    def stream(self, head: Head) -> EventStream:
        """See `Asked.stream`."""
        return MessageStream(self, head)


class MessageStream:
    """Events of one message: content blocks begin, grow and end, one after the other."""

    def __init__(self, asked: MessagesAsked, head: Head) -> None:
        self._asked, self._head = asked, head
        self._index = -1  # of the block that is open, or of the last one
        self._open: str | None = None

    def open(self) -> bytes:
        """See `EventStream.open`."""
        usage = {"input_tokens": self._head.num_prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=_message(self._head, self._asked.call.agent, usage))

    def add(self, choice: int, delta: Delta) -> bytes:
        """See `EventStream.add`."""
        events = b""
        if delta.reasoning:
            events += self._begin("thinking", thinking="", signature=_NEVER_SIGNED)
            events += self._grow("thinking_delta", thinking=delta.reasoning)
        if delta.text:
            events += self._begin("text", text="") + self._grow("text_delta", text=delta.text)
        if (call := delta.tool_call) is not None:
            events += self._shut()  # a call is a block of its own, also after another call
            events += self._begin("tool_use", id=call.call_id, name=call.name, input={})
            text = sse.encode(_arguments(call)).decode()
            events += self._grow("input_json_delta", partial_json=text) + self._shut()
        return events

    def end(self, choice: int, reply: Reply) -> bytes:
        """Closes the block that is open; a message without any gets an empty text."""
        return self._shut() if self._index >= 0 else self._begin("text", text="") + self._shut()

    def close(self, replies: Sequence[Reply]) -> bytes:
        """See `EventStream.close`."""
        (reply,) = replies
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_text}
        return _event("message_delta", delta=delta, usage=_usage(reply)) + _event("message_stop")

    def fail(self, error: CallError) -> bytes:
        """See `EventStream.fail`."""
        return sse.event("error", anthropic_error(error))

    def _begin(self, kind: str, **values: Any) -> bytes:
        if self._open == kind:
            return b""
        events = self._shut()
        self._index, self._open = self._index + 1, kind
        block = {"type": kind, **values}
        return events + _event("content_block_start", index=self._index, content_block=block)

    def _grow(self, kind: str, **values: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **values})

    def _shut(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._index)


def parse(body: Mapping[str, Any]) -> MessagesAsked:
    """Reads a request. Raises: CallError naming the field."""
    fields = Fields(body)
    fields.refuse(("prefill",), "an answer is never begun by the client")
    output = fields.any("output_config")
    if isinstance(output, dict) and output.get("format"):
        raise unsupported("output_config.format: nothing constrains the sampling", "output_config")
    choice = fields.any("tool_choice")
    if choice is not None and not isinstance(choice, dict):
        raise invalid(f"tool_choice: expected an object, got {kind_of(choice)}", "tool_choice")
    wanted = choice.get("type") if choice else "auto"
    tools, unread = read_tools(fields.objects("tools"))
    fields.any("thinking")  # whether the model thinks is its template's choice
    call = ChatCall(
        agent=fields.agent(),
        messages=read_conversation(fields.any("system"), fields.objects("messages")),
        tools=() if wanted == "none" else tools,
        max_tokens=fields.count("max_tokens"),
        temperature=fields.number("temperature"),
        stop=fields.stops("stop_sequences"),
        stream=fields.flag("stream"),
    )
    noted = unread if wanted in ("auto", "none") else (*unread, "tool_choice")
    return MessagesAsked(call=call, truncates=fields.truncating(), ignored=fields.ignored() + noted)


def token_count(num_tokens: int) -> dict[str, Any]:
    """The body that answers a request to count tokens."""
    return {"input_tokens": num_tokens}


def _event(name: str, /, **values: Any) -> bytes:
    return sse.event(name, {"type": name, **values})


def _message(head: Head, agent: str, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{head.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": agent,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    """Anthropic counts cached prompt tokens apart from the others, if they are known."""
    usage = {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.token_ids)}
    if (num_cached := reply.num_cached_tokens) is not None:
        usage["input_tokens"] -= num_cached
        usage |= {"cache_read_input_tokens": num_cached, "cache_creation_input_tokens": 0}
    return usage


def _stop_reason(reply: Reply) -> str:
    if reply.stop_text is not None:
        return "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(reply.finish_reason, "end_turn")


def _arguments(call: ToolCall) -> dict[str, Any]:
    """A call's input as an object; what is none is handed over under one name, since clients expect one."""
    try:
        arguments = orjson.loads(call.arguments)
    except ValueError:
        return {"arguments": call.arguments}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}
