"""OpenAI's text completions: a text or token ids go to the model as they are, without a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megloom.compute.gateway.dialects.dialect import EventStream, Head
from megloom.compute.gateway.dialects.errors import invalid, unsupported
from megloom.compute.gateway.dialects.fields import Fields, kind_of, shown
from megloom.compute.gateway.dialects.openai_choices import (
    ChunkStream,
    frame,
    read_sampling,
    usage,
    wants_usage,
)
from megloom.compute.gateway.dialects.tokens import read_ids
from megloom.compute.gateway.protocol import ChatCall, Delta, Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionAsked:
    """A request for text completions."""

    call: ChatCall
    ignored: tuple[str, ...]
    truncates: tuple[str, ...]
    wants_logprobs: bool
    wants_usage: bool

    def render(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """See `Asked.render`."""
        choices = []
        for index, reply in enumerate(replies):
            logprobs = _logprobs(reply.token_ids, reply.logprobs, 0, head) if self.wants_logprobs else None
            choices.append(
                {
                    "index": index,
                    "text": reply.text,
                    "logprobs": logprobs,
                    "finish_reason": reply.finish_reason,
                }
            )
        framed = frame(head, self.call, "text_completion", "cmpl")
        return {**framed, "choices": choices, "usage": usage(replies)}

    def stream(self, head: Head) -> EventStream:
        """See `Asked.stream`."""
        return CompletionStream(self, head)


class CompletionStream(ChunkStream):
    """Chunks of a text completion."""

    def __init__(self, asked: CompletionAsked, head: Head) -> None:
        framed = frame(head, asked.call, "text_completion", "cmpl")
        super().__init__(framed, ends_with_usage=asked.wants_usage)
        self._asked, self._head = asked, head
        self._offsets = [0] * asked.call.n

    def open(self) -> bytes:
        """Nothing comes first."""
        return b""

    def add(self, choice: int, delta: Delta) -> bytes:
        """See `EventStream.add`."""
        logprobs = None
        if self._asked.wants_logprobs and delta.token_ids:
            logprobs = _logprobs(delta.token_ids, delta.logprobs, self._offsets[choice], self._head)
        self._offsets[choice] += len(delta.text)
        return self.chunk(choice, text=delta.text, logprobs=logprobs) if delta.text or logprobs else b""

    def end(self, choice: int, reply: Reply) -> bytes:
        """See `EventStream.end`."""
        return self.chunk(choice, reply.finish_reason, text="", logprobs=None)


def parse(body: Mapping[str, Any]) -> CompletionAsked:
    """Reads a request. Raises: CallError naming the field."""
    fields = Fields(body)
    fields.refuse(("echo", "suffix"), "is not offered")
    if (fields.count("best_of") or 1) > 1:
        raise unsupported("best_of: is not offered, ask for n choices", "best_of")
    text, ids = _read_prompt(fields.any("prompt"))
    call = ChatCall(
        agent=fields.agent(),
        prompt_text=text,
        prompt_ids=ids,
        prompt_field="prompt",
        **read_sampling(fields, "max_tokens"),
    )
    return CompletionAsked(
        call=call,
        truncates=fields.truncating(),
        wants_logprobs=_wants_logprobs(fields.any("logprobs")),
        wants_usage=wants_usage(fields),
        ignored=fields.ignored(),
    )


def _wants_logprobs(given: Any) -> bool:
    """A number of alternatives asks for the sampled tokens' own log-probabilities, also 0; so does true."""
    if given is not None and not isinstance(given, bool | int):
        raise invalid(f"logprobs: expected a whole number, got {kind_of(given)}", "logprobs")
    return given is not None and given is not False


def _read_prompt(prompt: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """The prompt as a text or as ids; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("prompt: expected some text or token ids, got an empty text", "prompt")
        return prompt, None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise unsupported(f"prompt: one prompt per request, got {len(prompt)}", "prompt")
    if not isinstance(prompt, list):
        raise invalid(f"prompt: expected a string or token ids, got {shown(prompt)}", "prompt")
    return None, read_ids(prompt, "prompt")


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[float], offset: int, head: Head) -> dict[str, Any]:
    """Log-probabilities as completions give them. `offset` is where the tokens' text begins."""
    tokens = [head.token_text(token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }
