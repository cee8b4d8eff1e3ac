"""Anthropic's messages and tools in OpenAI's chat form, which templates and histories read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megloom.compute.gateway.dialects.errors import invalid, unsupported
from megloom.compute.gateway.dialects.fields import kind_of, shown
from megloom.compute.gateway.dialects.openai_messages import read_function, tool_call_message
from megloom.compute.gateway.protocol import ToolCall


def read_conversation(system: Any, messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """System text and messages as chat messages. Raises: CallError naming the one at fault."""
    if not messages:
        raise invalid("messages: expected at least one message, got none", "messages")
    read: list[dict[str, Any]] = []
    if system not in (None, []) and (text := _text_of(system, "system")):
        read.append({"role": "system", "content": text})
    for at, message in enumerate(messages):
        where, role, content = f"messages.{at}", message.get("role"), message.get("content")
        if role == "user":
            read += _read_user(content, f"{where}.content")
        elif role == "assistant":
            read.append(_read_assistant(content, f"{where}.content"))
        elif role == "system":
            read.append({"role": "system", "content": _text_of(content, f"{where}.content")})
        else:
            raise invalid(f"{where}.role: expected user or assistant, got {shown(role)}", "messages")
    if read[-1]["role"] == "assistant":
        raise unsupported("messages: the last one is the assistant's; an answer is never begun by the client")
    return tuple(read)


def read_tools(tools: Sequence[dict[str, Any]]) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """The client's tools, and notes about those that the provider would run itself: they are left out."""
    read, unread = [], []
    for at, tool in enumerate(tools):
        kind = tool.get("type")
        if kind is not None and kind != "custom":
            unread.append(f"tools of type {shown(kind)}")
            continue
        function = {**tool, "parameters": tool.get("input_schema")}
        read.append(read_function(function, f"tools.{at}"))
    return tuple(read), tuple(dict.fromkeys(unread))


def _read_user(content: Any, where: str) -> list[dict[str, Any]]:
    """A user's message: each tool result becomes a message of its own, texts between them are joined."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    read: list[dict[str, Any]] = []
    for at, block in enumerate(_blocks(content, where)):
        if block.get("type") == "tool_result":
            call_id = block.get("tool_use_id")
            if not isinstance(call_id, str):
                raise invalid(
                    f"{where}.{at}.tool_use_id: expected a string, got {kind_of(call_id)}", "messages"
                )
            result = block.get("content")
            text = "" if result in (None, []) else _text_of(result, f"{where}.{at}.content")
            read.append({"role": "tool", "tool_call_id": call_id, "content": text})
            continue
        text = _block_text(block, f"{where}.{at}")
        if read and read[-1]["role"] == "user":
            read[-1]["content"] += f"\n{text}"
        else:
            read.append({"role": "user", "content": text})
    return read


def _read_assistant(content: Any, where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(_blocks(content, where)):
        kind = block.get("type")
        if kind == "thinking":
            if isinstance(thought := block.get("thinking"), str):
                thinking.append(thought)
        elif kind == "tool_use":
            calls.append(_read_call(block, f"{where}.{at}"))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, f"{where}.{at}"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    call_id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise invalid(f"{where}: expected a tool use with id and name, got {shown(block)}", "messages")
    if not isinstance(given, dict):
        raise invalid(f"{where}.input: expected an object, got {kind_of(given)}", "messages")
    return tool_call_message(ToolCall(call_id=call_id, name=name, arguments=json.dumps(given)))


def _text_of(content: Any, where: str) -> str:
    """A text, or text blocks on lines of their own."""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}.{at}") for at, block in enumerate(_blocks(content, where)))


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not content:
        raise invalid(f"{where}: expected a string or a list of blocks, got {shown(content)}", "messages")
    for at, block in enumerate(content):
        if not isinstance(block, dict):
            raise invalid(f"{where}.{at}: expected an object, got {kind_of(block)}", "messages")
    return content


def _block_text(block: dict[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise unsupported(f"{where}: only text blocks are read, got type {shown(block.get('type'))}")
    if not isinstance(text := block.get("text"), str):
        raise invalid(f"{where}.text: expected a string, got {kind_of(text)}", "messages")
    return text
