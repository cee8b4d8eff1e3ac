"""Token ids in, token ids out: for programs that render their prompts themselves. Never streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megloom.compute.gateway.dialects.dialect import EventStream, Head
from megloom.compute.gateway.dialects.errors import invalid, unsupported
from megloom.compute.gateway.dialects.fields import Fields, kind_of, shown
from megloom.compute.gateway.dialects.openai_choices import read_sampling
from megloom.compute.gateway.protocol import ChatCall, Reply

MAX_TOKEN_ID = (1 << 31) - 1  # engines keep ids in 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensAsked:
    """A request for tokens."""

    call: ChatCall
    ignored: tuple[str, ...]
    truncates: tuple[str, ...]

    def render(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """Ids, log-probabilities and version spans `[version, start, end)` of each choice."""
        return {
            "id": head.answer_id,
            "object": "tokens",
            "created": head.created_s,
            "model": self.call.agent,
            "choices": [
                {
                    "index": index,
                    "output_ids": reply.token_ids,
                    "logprobs": reply.logprobs,
                    "version_spans": reply.version_spans,
                    "finish_reason": reply.finish_reason,
                }
                for index, reply in enumerate(replies)
            ],
            "num_prompt_tokens": head.num_prompt_tokens,
        }

    def stream(self, head: Head) -> EventStream:
        """`parse` refuses streams."""
        raise AssertionError("a token request is never streamed")


def parse(body: Mapping[str, Any]) -> TokensAsked:
    """Reads a request. Raises: CallError naming the field."""
    fields = Fields(body)
    sampling = read_sampling(fields, "max_tokens")
    if sampling["stream"]:
        raise unsupported("stream: token requests are not streamed", "stream")
    ids = fields.any("input_ids")
    if not isinstance(ids, list):
        raise invalid(f"input_ids: expected a list of token ids, got {kind_of(ids)}", "input_ids")
    call = ChatCall(
        agent=fields.agent(),
        prompt_ids=read_ids(ids, "input_ids"),
        prompt_field="input_ids",
        **sampling,
    )
    return TokensAsked(call=call, truncates=fields.truncating(), ignored=fields.ignored())


def read_ids(ids: Sequence[Any], name: str) -> tuple[int, ...]:
    """Token ids. Raises: CallError naming the first that is none."""
    if not ids:
        raise invalid(f"{name}: expected some token ids, got none", name)
    for at, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:  # bool is an int, too
            raise invalid(f"{name}[{at}]: expected a token id, got {shown(token_id)}", name)
    return tuple(ids)
