"""How bodies and server-sent events are written as bytes. Lone surrogates do not stop an answer."""

from __future__ import annotations

import json
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"  # OpenAI's chat and completion streams end with it


def encode(value: Any) -> bytes:
    """JSON bytes of plain data."""
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate has no UTF-8; the escaped form has
        return json.dumps(value, separators=(",", ":")).encode("ascii")


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """A named event."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"
