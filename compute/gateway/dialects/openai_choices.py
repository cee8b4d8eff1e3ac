"""What OpenAI's chat and text completions share: the frame, its chunks, usage, sampling options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megloom.compute.gateway.dialects import sse
from megloom.compute.gateway.dialects.dialect import Head
from megloom.compute.gateway.dialects.errors import CallError, invalid, openai_error
from megloom.compute.gateway.dialects.fields import Fields, kind_of
from megloom.compute.gateway.protocol import ChatCall, Reply


def read_sampling(fields: Fields, *max_tokens: str) -> dict[str, Any]:
    """The fields of a `ChatCall` that say how it is sampled. `max_tokens` are the names that count.

    Raises: CallError naming the field.
    """
    return {
        "max_tokens": fields.count(*max_tokens),
        "temperature": fields.number("temperature"),
        "stop": fields.stops("stop"),
        "n": fields.choices(),
        "stream": fields.flag("stream"),
    }


def wants_usage(fields: Fields) -> bool:
    """Whether a stream ends with its usage. Raises: CallError."""
    options = fields.any("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid(f"stream_options: expected an object, got {kind_of(options)}", "stream_options")
    return Fields(options).flag("include_usage")


def frame(head: Head, call: ChatCall, kind: str, prefix: str) -> dict[str, Any]:
    """What a body and each of its chunks say before the choices."""
    return {
        "id": f"{prefix}-{head.answer_id}",
        "object": kind,
        "created": head.created_s,
        "model": call.agent,
    }


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Tokens of an answer: the prompt counts once, however many choices it has."""
    num_prompt = len(replies[0].prompt_ids)
    num_completion = sum(len(reply.token_ids) for reply in replies)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
    if (num_cached := replies[0].num_cached_tokens) is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return counts


class ChunkStream:
    """The chunks of a stream. What a choice's entry holds is the dialect's."""

    def __init__(self, framed: dict[str, Any], *, ends_with_usage: bool) -> None:
        self._frame = framed | ({"usage": None} if ends_with_usage else {})
        self._ends_with_usage = ends_with_usage

    def chunk(self, choice: int, finish_reason: str | None = None, **entry: Any) -> bytes:
        """One chunk with one choice."""
        entry = {"index": choice, **entry, "finish_reason": finish_reason}
        return sse.data({**self._frame, "choices": [entry]})

    def close(self, replies: Sequence[Reply]) -> bytes:
        """See `EventStream.close`."""
        if not self._ends_with_usage:
            return sse.DONE
        return sse.data({**self._frame, "choices": [], "usage": usage(replies)}) + sse.DONE

    def fail(self, error: CallError) -> bytes:
        """See `EventStream.fail`."""
        return sse.data(openai_error(error))
