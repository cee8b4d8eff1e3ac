"""Chat messages of requests: the one form that templates read, and what makes two of them the same. Pure.

Clients dress messages up differently from turn to turn: a text becomes a list of parts, a null field comes
and goes, arguments get other spaces. `plain_messages` undoes the dress, `message_key` says what is left of
identity. Called by the history and by whoever renders or records a request.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from megloom.compute.graph.seeds import canonical_json

TEXT_PARTS = {"text", "input_text", "output_text"}
# Templates know `system`; `developer` is the newer name of the same role.
ROLES = {"developer": "system"}


class MessageError(ValueError):
    """A message that cannot be rendered; says which one and why."""


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates read them: content is a text, arguments are objects, nulls and extras are gone.

    Kept: role, content, name, reasoning_content, tool_calls, tool_call_id. Plain messages stay as they are.

    Raises: MessageError naming the position of a message without a role or with content that is no text.
    """
    return [_plain_message(position, message) for position, message in enumerate(messages)]


def message_key(message: Mapping[str, Any], known_calls: Container[str]) -> str:
    """What makes a plain message the same one: role, content, tool calls by id and name.

    Arguments count only for calls that are not among `known_calls`: of a known call we have what the model
    wrote. Space around an assistant's text does not count, since clients trim it.
    """
    content = message["content"]
    if message["role"] == "assistant":
        content = content.strip()
    calls = [_call_key(call, known_calls) for call in message.get("tool_calls", ())]
    return canonical_json([message["role"], content, calls, message.get("tool_call_id")])


def call_ids(message: Mapping[str, Any]) -> list[str]:
    """The ids of the tool calls of a plain message."""
    return [call["id"] for call in message.get("tool_calls", ())]


def _plain_message(position: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not role:
        raise MessageError(f"message {position}: expected a mapping with a role, got {message!r:.200}")
    if message.get("function_call") is not None:
        raise MessageError(f"message {position}: function_call is not served, send tool_calls")
    plain: dict[str, Any] = {
        "role": ROLES.get(role, role),
        "content": _text(position, message.get("content")),
    }
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = message.get(name)
        if isinstance(value, str) and value:
            plain[name] = value
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_plain_call(position, call) for call in calls]
    return plain


def _text(position: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise MessageError(f"message {position}: content must be a text or parts, got {content!r:.200}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise MessageError(f"message {position}: expected text parts only, got one of type {kind!r}")
        texts.append(part["text"])
    return "".join(texts)


def _plain_call(position: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"message {position}: a tool call needs function.name, got {call!r:.200}")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(arguments: Any) -> Any:
    """Arguments as an object, which templates print themselves; text that holds none stays text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _call_key(call: Mapping[str, Any], known_calls: Container[str]) -> list[Any]:
    function = call["function"]
    if call["id"] in known_calls:
        return [call["id"], function["name"]]
    return [call["id"], function["name"], function["arguments"]]
