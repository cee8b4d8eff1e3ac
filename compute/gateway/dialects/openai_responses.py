"""OpenAI's responses, streamed and not. Nothing is kept between requests: the client sends the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megloom.compute.gateway.dialects.dialect import EventStream, Head
from megloom.compute.gateway.dialects.errors import invalid, unsupported
from megloom.compute.gateway.dialects.fields import Fields, kind_of, shown
from megloom.compute.gateway.dialects.openai_chat import forced_choice, refuse_formats
from megloom.compute.gateway.dialects.openai_messages import (
    read_call,
    read_content,
    read_function,
    read_messages,
)
from megloom.compute.gateway.dialects.responses_stream import (
    ResponseStream,
    call_item,
    message_item,
    reasoning_item,
    response_body,
)
from megloom.compute.gateway.protocol import ChatCall, Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseAsked:
    """A request for a response. `echo` are the fields that the response repeats."""

    call: ChatCall
    ignored: tuple[str, ...]
    truncates: tuple[str, ...]
    echo: Mapping[str, Any]

    def render(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """See `Asked.render`."""
        (reply,) = replies
        output: list[dict[str, Any]] = []
        if reply.reasoning:
            output.append(reasoning_item(head, len(output), reply.reasoning))
        if reply.text or not reply.tool_calls:
            output.append(message_item(head, len(output), reply.text))
        output += [call_item(call) for call in reply.tool_calls]
        return response_body(head, self.echo, output=output, reply=reply)

    def stream(self, head: Head) -> EventStream:
        """See `Asked.stream`."""
        return ResponseStream(head, self.echo)


def parse(body: Mapping[str, Any]) -> ResponseAsked:
    """Reads a request. Raises: CallError naming the field."""
    fields = Fields(body)
    fields.refuse(
        ("previous_response_id", "conversation", "background"),
        "responses are not kept here; send the whole history as input",
    )
    fields.refuse(("prompt",), "stored prompts are not offered; send instructions and input")
    text = fields.any("text")
    if isinstance(text, dict):
        refuse_formats(text.get("format"), "text.format")
    tools = _read_tools(fields.objects("tools"))
    choice = fields.any("tool_choice")
    system = fields.text("instructions")
    messages = _read_input(fields.any("input"))
    if system:
        messages = ({"role": "system", "content": system}, *messages)
    call = ChatCall(
        agent=fields.agent(),
        messages=messages,
        tools=() if choice == "none" else tools,
        max_tokens=fields.count("max_output_tokens"),
        temperature=fields.number("temperature"),
        stream=fields.flag("stream"),
        prompt_field="input",
    )
    echo = {
        "model": call.agent,
        "instructions": system,
        "max_output_tokens": call.max_tokens,
        "tools": body.get("tools") or [],
        "tool_choice": choice if choice is not None else "auto",
        "metadata": fields.any("metadata") or {},
    }
    noted = forced_choice(choice, ("none", "auto"))
    return ResponseAsked(
        call=call, truncates=fields.truncating(), ignored=fields.ignored() + noted, echo=echo
    )


def _read_tools(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Functions stand flat here, where chat completions nest them."""
    read = []
    for at, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise unsupported(
                f"tools[{at}]: only functions are offered, got {shown(tool.get('type'))}", "tools"
            )
        read.append(read_function(tool, f"tools[{at}]"))
    return tuple(read)


def _read_input(given: Any) -> tuple[dict[str, Any], ...]:
    """The input as chat messages: a model's reasoning, text and calls of one turn become one message."""
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list) or not given:
        raise invalid(f"input: expected a string or a list of items, got {shown(given)}", "input")
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(given):
        if not isinstance(item, dict):
            raise invalid(f"input[{at}]: expected an object, got {kind_of(item)}", "input")
        _add_item(messages, item, f"input[{at}]")
    if not messages:
        raise invalid("input: expected at least one message, got none", "input")
    return tuple(messages)


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        (message,) = read_messages([item], where)
        if message["role"] == "assistant":
            turn = _assistant_turn(messages)
            turn["content"] = f"{turn['content'] or ''}{message['content']}"
        else:
            messages.append(message)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = (
            [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        )
        turn = _assistant_turn(messages)
        turn["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
    elif kind == "function_call":
        turn = _assistant_turn(messages)
        named = {name: item.get(name) for name in ("call_id", "name", "arguments")}
        turn.setdefault("tool_calls", []).append(read_call(named, where))
    elif kind == "function_call_output":
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise invalid(f"{where}.call_id: expected a string, got {kind_of(call_id)}", "input")
        content = read_content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    else:
        raise unsupported(f"{where}: items of type {shown(kind)} are not read", "input")


def _assistant_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
