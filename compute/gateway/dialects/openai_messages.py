"""OpenAI's chat messages and tools, checked and put into the one form that templates and histories read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megloom.compute.gateway.dialects.errors import invalid, unsupported
from megloom.compute.gateway.dialects.fields import kind_of, shown
from megloom.compute.gateway.protocol import Reply, ToolCall

MAX_DEPTH = 64  # of a tool's schema; templates and JSON writers recurse
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {"text", "input_text", "output_text"}


def read_messages(messages: Sequence[dict[str, Any]], name: str = "messages") -> tuple[dict[str, Any], ...]:
    """The messages with texts for contents and `system` for `developer`. Raises: CallError."""
    if not messages:
        raise invalid(f"{name}: expected at least one message, got none", name)
    return tuple(_read_message(message, f"{name}[{at}]") for at, message in enumerate(messages))


def _read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    given = message.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise invalid(f"{where}.role: expected one of {sorted(_ROLES)}, got {shown(given)}", where)
    separator = "" if role == "assistant" else "\n"  # an answer's parts are one text, cut
    content = read_content(message.get("content"), f"{where}.content", separator)
    read: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        _read_assistant(message, read, where)
    elif role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str):
            raise invalid(f"{where}.tool_call_id: expected a string, got {kind_of(call_id)}", where)
        read["tool_call_id"] = call_id
    if isinstance(name := message.get("name"), str):
        read["name"] = name
    return read


def _read_assistant(message: dict[str, Any], read: dict[str, Any], where: str) -> None:
    if isinstance(reasoning := message.get("reasoning_content"), str):
        read["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls: expected a list, got {kind_of(calls)}", where)
    read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise invalid(f"{where}: expected a function call, got {shown(call)}", where)
    named = {"id": call.get("id"), "function.name": function.get("name")}
    return read_call({**named, "function.arguments": function.get("arguments", "")}, where)


def read_call(named: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool call from its id, name and arguments, under the client's names. Raises: CallError."""
    for label, value in named.items():
        if not isinstance(value, str):
            raise invalid(f"{where}.{label}: expected a string, got {kind_of(value)}", where)
    call_id, name, arguments = named.values()
    return tool_call_message(ToolCall(call_id=call_id, name=name, arguments=arguments))


def tool_call_message(call: ToolCall) -> dict[str, Any]:
    """A tool call as an assistant's message holds it."""
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def read_content(content: Any, where: str, separator: str = "\n") -> str:
    """A content as one text: parts stand on lines of their own, null is empty.

    Raises: CallError for what is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}: expected a string or a list of parts, got {kind_of(content)}", where)
    texts = []
    for at, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            continue
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise unsupported(f"{where}[{at}]: only text parts are read, got type {shown(kind)}", where)
        if not isinstance(text := part.get("text"), str):
            raise invalid(f"{where}[{at}].text: expected a string, got {kind_of(text)}", where)
        texts.append(text)
    return separator.join(texts)


def read_function(function: Any, where: str) -> dict[str, Any]:
    """A function's description in the form that templates read. Raises: CallError."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}: expected a function with a name, got {shown(function)}", where)
    kept: dict[str, Any] = {"name": function["name"]}
    if isinstance(description := function.get("description"), str):
        kept["description"] = description
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}.parameters: expected an object, got {kind_of(parameters)}", where)
    if _depth(parameters) > MAX_DEPTH:
        raise invalid(f"{where}.parameters: nested deeper than {MAX_DEPTH} levels", where)
    kept["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": kept}


def _depth(value: Any) -> int:
    """How deep objects and lists are nested, counted level by level."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth


def read_tools(tools: Sequence[dict[str, Any]], name: str = "tools") -> tuple[dict[str, Any], ...]:
    """Chat tools. Raises: CallError."""
    read = []
    for at, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise unsupported(
                f"{name}[{at}]: only functions are offered, got {shown(tool.get('type'))}", name
            )
        read.append(read_function(tool.get("function"), f"{name}[{at}].function"))
    return tuple(read)


def reply_message(reply: Reply) -> dict[str, Any]:
    """The assistant's message of an answer, as a chat client gets it and sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [tool_call_message(call) for call in reply.tool_calls]
    return message
