"""The gateway's routes as an OpenAPI 3.1 document: what each takes, and every form in which each answers.

`description()` is the document below one episode's path. It states what the gateway promises, not all that
it takes: unknown fields are ignored (`dialects/fields.py`), and some bodies that fit are refused for what
they mean, with status 400. Read by `test_gateway_description.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": ["boolean", "null"]}
COUNT: Schema = {"type": ["integer", "null"], "minimum": 1}
NUMBER: Schema = {"type": ["number", "null"], "minimum": 0}
NATURAL: Schema = {"type": "integer", "minimum": 0}
LOGPROBS: Schema = {"type": "array", "items": {"type": "number", "maximum": 0}}


def closed(optional: Sequence[str] = (), /, **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def opened(properties: Mapping[str, Schema], /, *required: str) -> Schema:
    """An object that may have other properties besides."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def listed(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    """A list of at least so many items."""
    bounds = {"minItems": least} | ({} if most is None else {"maxItems": most})
    return {"type": "array", "items": items, **bounds}


def one_of(*values: Any) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


ANY: Schema = {}
TOKEN_IDS = listed({"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}, 1)
STOPS: Schema = {"anyOf": [{"type": "null"}, TEXT, listed(TEXT, 0, 64)]}
CHOICES: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": 128}
STREAM_OPTIONS = nullable(opened({"include_usage": FLAG}))

# --- errors

OPENAI_ERROR = closed(
    error=closed(
        message=NAME,
        type=one_of("invalid_request_error", "authentication_error", "server_error"),
        param=nullable(TEXT),
        code=nullable(TEXT),
    )
)
ANTHROPIC_KINDS = (
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "request_too_large",
    "api_error",
    "overloaded_error",
)
ANTHROPIC_ERROR = closed(type=one_of("error"), error=closed(type=one_of(*ANTHROPIC_KINDS), message=NAME))
REFUSALS = ("400", "401", "404", "405", "410", "413", "502", "503")  # `errors.py`; 500 is never promised

# --- requests

PART = opened({"type": one_of("text", "input_text", "output_text"), "text": TEXT}, "type", "text")
CONTENT: Schema = {"anyOf": [TEXT, listed({"anyOf": [TEXT, PART]}), {"type": "null"}]}
PARAMETERS = nullable({"type": "object"})
FUNCTION = opened({"name": TEXT, "description": ANY, "parameters": PARAMETERS}, "name")
CALL = opened({"id": TEXT, "function": opened({"name": TEXT, "arguments": TEXT}, "name")}, "id", "function")
CHAT_MESSAGE: Schema = {
    "anyOf": [
        opened({"role": one_of("system", "developer", "user"), "content": CONTENT}, "role"),
        opened(
            {"role": one_of("assistant"), "content": CONTENT, "tool_calls": nullable(listed(CALL))}, "role"
        ),
        opened({"role": one_of("tool"), "content": CONTENT, "tool_call_id": TEXT}, "role", "tool_call_id"),
    ]
}
CHAT = {
    "messages": listed(CHAT_MESSAGE, 1),
    "tools": nullable(listed(opened({"type": one_of("function"), "function": FUNCTION}, "function"))),
    "tool_choice": ANY,
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "stop": STOPS,
    "n": CHOICES,
    "stream": FLAG,
    "stream_options": STREAM_OPTIONS,
    "logprobs": FLAG,
    "response_format": nullable(opened({"type": one_of("text")}, "type")),
}
COMPLETION = {
    "prompt": {"anyOf": [NAME, TOKEN_IDS, listed(NAME, 1, 1), listed(TOKEN_IDS, 1, 1)]},
    "max_tokens": COUNT,
    "stop": STOPS,
    "n": CHOICES,
    "stream": FLAG,
    "stream_options": STREAM_OPTIONS,
    "logprobs": {"type": ["integer", "boolean", "null"]},
    "best_of": one_of(None, 1),
}
ITEM: Schema = {
    "anyOf": [
        opened({"role": one_of("system", "developer", "user", "assistant"), "content": CONTENT}, "role"),
        opened(
            {"type": one_of("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT},
            *("type", "call_id", "name", "arguments"),
        ),
        opened(
            {"type": one_of("function_call_output"), "call_id": TEXT, "output": CONTENT}, "type", "call_id"
        ),
        opened({"type": one_of("reasoning"), "summary": ANY, "content": ANY}, "type"),
    ]
}
RESPONSE = {
    "input": {"anyOf": [TEXT, listed(ITEM, 1)]},
    "instructions": nullable(TEXT),
    "tools": nullable(
        listed(opened({"type": one_of("function"), "name": TEXT, "parameters": PARAMETERS}, "type", "name"))
    ),
    "max_output_tokens": COUNT,
    "stream": FLAG,
}
TEXT_BLOCK = opened({"type": one_of("text"), "text": TEXT}, "type", "text")
RESULT_BLOCK = opened(
    {
        "type": one_of("tool_result"),
        "tool_use_id": TEXT,
        "content": nullable({"anyOf": [TEXT, listed(TEXT_BLOCK)]}),
    },
    *("type", "tool_use_id"),
)
USE_BLOCK = opened(
    {"type": one_of("tool_use"), "id": TEXT, "name": TEXT, "input": {"type": "object"}},
    *("type", "id", "name", "input"),
)
THINKING_BLOCK = opened({"type": one_of("thinking", "redacted_thinking"), "thinking": ANY}, "type")


def _turn(role: str, *blocks: Schema) -> Schema:
    content = {"anyOf": [TEXT, listed({"anyOf": list(blocks)}, 1)]}
    return opened({"role": one_of(role), "content": content}, "role", "content")


USER, ASSISTANT = (
    _turn("user", TEXT_BLOCK, RESULT_BLOCK),
    _turn("assistant", TEXT_BLOCK, USE_BLOCK, THINKING_BLOCK),
)
MESSAGE = {
    "messages": listed({"anyOf": [USER, ASSISTANT, _turn("system", TEXT_BLOCK)]}, 1),
    "system": nullable({"anyOf": [TEXT, listed(TEXT_BLOCK)]}),
    "tools": nullable(listed(opened({"name": TEXT, "description": ANY, "input_schema": PARAMETERS}, "name"))),
    "tool_choice": nullable(opened({"type": ANY})),
    "max_tokens": COUNT,
    "stop_sequences": STOPS,
    "stream": FLAG,
}
TOKENS = {"input_ids": TOKEN_IDS, "max_tokens": COUNT, "stop": STOPS, "n": CHOICES}
REQUESTS: dict[str, tuple[dict[str, Schema], str]] = {  # the fields, and the one besides `model` that must be
    "/v1/chat/completions": (CHAT, "messages"),
    "/v1/completions": (COMPLETION, "prompt"),
    "/v1/responses": (RESPONSE, "input"),
    "/v1/messages": (MESSAGE, "messages"),
    "/v1/messages/count_tokens": (MESSAGE, "messages"),
    "/v1/tokens": (TOKENS, "input_ids"),
}

# --- answers

FINISH = one_of("stop", "length", "tool_calls")
NULL: Schema = {"type": "null"}
USAGE = closed(
    ("prompt_tokens_details",),
    prompt_tokens=NATURAL,
    completion_tokens=NATURAL,
    total_tokens=NATURAL,
    prompt_tokens_details=closed(cached_tokens=NATURAL),
)
ANSWERED_CALL = closed(id=NAME, type=one_of("function"), function=closed(name=TEXT, arguments=TEXT))
ANSWERED = closed(
    ("reasoning_content", "tool_calls"),
    role=one_of("assistant"),
    content=nullable(TEXT),
    refusal=NULL,
    reasoning_content=NAME,
    tool_calls=listed(ANSWERED_CALL, 1),
)
TOKEN = closed(
    token=TEXT,
    logprob={"type": "number", "maximum": 0},
    bytes=listed(NATURAL),
    top_logprobs=listed(ANY, 0, 0),
)
CHAT_CHOICE = closed(
    index=NATURAL,
    message=ANSWERED,
    logprobs=nullable(closed(content=listed(TOKEN), refusal=NULL)),
    finish_reason=FINISH,
)
TEXT_LOGPROBS = closed(
    tokens=listed(TEXT), token_logprobs=LOGPROBS, top_logprobs=NULL, text_offset=listed(NATURAL)
)
TEXT_CHOICE = closed(index=NATURAL, text=TEXT, logprobs=nullable(TEXT_LOGPROBS), finish_reason=FINISH)
TOKENS_CHOICE = closed(
    index=NATURAL,
    output_ids=listed(NATURAL, 1),
    logprobs=LOGPROBS,
    version_spans=listed(listed(NATURAL, 3, 3), 1),
    finish_reason=one_of("stop", "length"),
)
OUTPUT_ITEM = opened({"type": one_of("message", "reasoning", "function_call"), "id": NAME}, "type", "id")
COUNTED = opened({"input_tokens": NATURAL, "output_tokens": NATURAL}, "input_tokens", "output_tokens")
RESPONSE_ANSWER = {
    "id": NAME,
    "object": one_of("response"),
    "created_at": NATURAL,
    "status": one_of("completed", "incomplete"),
    "error": NULL,
    "output": listed(OUTPUT_ITEM, 1),
    "model": NAME,
    "usage": COUNTED,
}
ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": closed(
        id=NAME,
        object=one_of("chat.completion"),
        created=NATURAL,
        model=NAME,
        choices=listed(CHAT_CHOICE, 1),
        usage=USAGE,
    ),
    "/v1/completions": closed(
        id=NAME,
        object=one_of("text_completion"),
        created=NATURAL,
        model=NAME,
        choices=listed(TEXT_CHOICE, 1),
        usage=USAGE,
    ),
    "/v1/responses": opened(RESPONSE_ANSWER, *RESPONSE_ANSWER),
    "/v1/messages": closed(
        id=NAME,
        type=one_of("message"),
        role=one_of("assistant"),
        model=NAME,
        content=listed(opened({"type": one_of("text", "thinking", "tool_use")}, "type"), 1),
        stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        stop_sequence=nullable(TEXT),
        usage=COUNTED,
    ),
    "/v1/messages/count_tokens": closed(input_tokens={"type": "integer", "minimum": 1}),
    "/v1/tokens": closed(
        id=NAME,
        object=one_of("tokens"),
        created=NATURAL,
        model=NAME,
        choices=listed(TOKENS_CHOICE, 1),
        num_prompt_tokens=NATURAL,
    ),
    "/v1/models": closed(
        object=one_of("list"),
        data=listed(closed(id=NAME, object=one_of("model"), created=NATURAL, owned_by=one_of("megloom")), 1),
    ),
}
EVENTS: dict[str, str] = {  # patterns of the names of a stream's events; those without one are messages
    "/v1/chat/completions": "^message$",
    "/v1/completions": "^message$",
    "/v1/responses": r"^response(\.[a-z_]+)+$",
    "/v1/messages": "^(message|content_block)_(start|delta|stop)$",
}


def description(agents: Sequence[str], *, has_token: bool = True) -> dict[str, Any]:
    """The document for an episode with these agents. Without its token every answer is a refusal."""
    paths: dict[str, Any] = {}
    for route in ANSWERS:
        operation: dict[str, Any] = {"responses": _responses(route, REFUSALS if has_token else ("401",))}
        if has_token:
            operation["responses"]["200"] = _answered(route)
        if route in REQUESTS:
            fields, needed = REQUESTS[route]
            schema = opened({"model": one_of(*agents), "temperature": NUMBER, **fields}, "model", needed)
            operation["requestBody"] = {"required": True, "content": _json(schema)}
        paths[route] = {"post" if route in REQUESTS else "get": operation}
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Megloom's gateway", "version": "1"},
        "components": {"securitySchemes": schemes},
        "security": [{"bearer": []}, {"key": []}] if has_token else [],
        "paths": paths,
    }


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _answered(route: str) -> dict[str, Any]:
    content = _json(ANSWERS[route])
    if route in EVENTS:
        data = {"type": "string", "pattern": r"^(\{.*\}|\[DONE\])$"}
        event = closed(event={"type": "string", "pattern": EVENTS[route]}, data=data)
        content["text/event-stream"] = {"schema": event}
    return {"description": "answered", "content": content}


def _responses(route: str, statuses: Sequence[str]) -> dict[str, Any]:
    schema = ANTHROPIC_ERROR if route.startswith("/v1/messages") else OPENAI_ERROR
    return {status: {"description": "refused", "content": _json(schema)} for status in statuses}
