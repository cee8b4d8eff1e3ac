"""Seeds and stable hashes: each random choice derives from the run seed and the names of what it is for."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def derive_seed(*parts: str | int) -> int:
    """A 62-bit seed from its parts; other parts give an unrelated seed."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


def stable_id(*parts: str | int) -> str:
    """32 hex digits, always the same length: engines match request ids by prefix."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def canonical_json(value: Any) -> str:
    """ASCII JSON with sorted keys and no spaces: equal content, equal text. Lone surrogates stay, escaped."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def content_hash(value: Any) -> str:
    """16 hex digits of the canonical JSON of `value`: equal content, equal hash."""
    return text_hash(canonical_json(value))


def text_hash(text: str) -> str:
    """16 hex digits of a text without lone surrogates, such as canonical JSON."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
