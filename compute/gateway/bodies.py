"""Request bodies: bounded, and JSON objects or an error that says why not."""

from __future__ import annotations

import json
from typing import Any

import orjson
from starlette.types import Receive, Scope

from megloom.compute.gateway.dialects.errors import CallError, ErrorKind, invalid
from megloom.compute.gateway.dialects.fields import kind_of

MAX_BODY_BYTES = 32 << 20  # three times the longest prompts that are sent
_LONE = b"\\ud"  # surrogates, lone ones among them, come as escapes that begin so


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises: CallError if it is larger than `MAX_BODY_BYTES` or its client went away."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > MAX_BODY_BYTES:
            raise _too_large()
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_gone()
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, lone surrogates included. Raises: CallError."""
    try:
        value = orjson.loads(body)
    except ValueError as error:
        value = _read_with_surrogates(body, error)
    if not isinstance(value, dict):
        raise invalid(f"the body: expected a JSON object, got {kind_of(value)}")
    return value


def _read_with_surrogates(body: bytes, refused: ValueError) -> Any:
    """orjson takes valid Unicode only; the standard library reads what Python's own clients may send."""
    if _LONE in body.lower():
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            pass  # the first reader's message tells more
    raise invalid(f"the body is not JSON: {refused}") from None


def client_gone(why: str = "client went away") -> CallError:
    """Nobody reads the answer."""
    return CallError(ErrorKind.CLIENT_GONE, why)


def _too_large() -> CallError:
    return CallError(ErrorKind.TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
