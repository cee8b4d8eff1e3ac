"""The answer of one call while it grows: its tokens, joined over all engines that sampled it, and its text.

Promises: every token that is kept has been told by an engine, once and in order; the text that a client sees
is a view of those tokens. What does not add up (a lost log-probability, a gap between version spans) is kept
and named in `unusable`: the client has its answer and nothing is trained on it. One call is the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from megloom.compute.gateway.detokenizer import Detokenizer
from megloom.compute.gateway.protocol import Delta, Reply, Sampled, flaw
from megloom.compute.gateway.stop_texts import StopTexts
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.gateway.tool_calls import AnswerParser, join_deltas


class GrowingAnswer:
    """`take` what engines sampled, `deltas` for a stream, `finish` for the reply.

    `max_tokens` and `stop_token_ids` end the answer as they do at the engine. `parser` is None where the
    client wants the text as it is.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        max_tokens: int,
        parser: AnswerParser | None,
    ) -> None:
        self.max_tokens = max_tokens
        self.unusable: str | None = None
        self._stop_token_ids = stop_token_ids
        self._detokenizer = Detokenizer(template.decode)
        self._stops = StopTexts(stops) if stops else None
        self._parser = parser
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int, int]] = []
        self._base = 0  # how many tokens earlier requests have sampled
        self._num_cached: int | None = None
        self._unspelled: list[int] = []  # shown, their text not yet asked for
        self._text: list[str] = []
        self._num_read = 0  # texts that the parser has seen
        self._deltas: list[Delta] = []
        self._num_told = 0  # tokens that deltas hold

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens until now."""
        return tuple(self._ids)

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_tokens - len(self._ids)

    @property
    def stop_text(self) -> str | None:
        """The stop text that has ended the answer."""
        return self._stops.found if self._stops is not None else None

    @property
    def text(self) -> str:
        """The text until now, markers of tool calls and thinking included."""
        self._spell()
        return "".join(self._text)

    @property
    def sampled(self) -> Sampled:
        """All tokens with what engines told of them."""
        return Sampled(
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            version_spans=tuple(self._spans),
        )

    def begin_request(self) -> None:
        """Another engine goes on: its spans count from here."""
        self._base = len(self._ids)

    def is_complete(self) -> str | None:
        """The finish reason that the tokens themselves give, if an engine went away before it said so."""
        if self._ids and self._ids[-1] in self._stop_token_ids:
            return "stop"
        return "length" if self.num_left <= 0 else None

    def take(self, sampled: Sampled) -> None:
        """Keeps a piece, up to the token that completes a stop text."""
        if self._num_cached is None:  # of the first engine that tells: the next ones get a longer prompt
            self._num_cached = sampled.num_cached_tokens
        shown = [token_id for token_id in sampled.token_ids if token_id not in self._stop_token_ids]
        if self._stops is None:
            self._keep(sampled, len(sampled.token_ids))
            self._unspelled += shown  # several pieces are decoded in one
            return
        for position, token_id in enumerate(shown, start=1):
            self._text.append(self._stops.feed(self._detokenizer.feed((token_id,))))
            if self._stops.found is not None:
                self._keep(sampled, position)
                return
        self._keep(sampled, len(sampled.token_ids))

    def deltas(self) -> list[Delta]:
        """What a stream may be told now; tokens whose text is held back come with later text."""
        return self._with_tokens(self._parse(self._unread()))

    def finish(self) -> list[Delta]:
        """No more tokens come: the deltas that were held back, and all tokens that none has told."""
        self._spell()
        rest = self._detokenizer.finish()
        if self._stops is not None and self._stops.found is None:
            rest = self._stops.feed(rest)
            rest += self._stops.finish()
        self._text.append(rest if self.stop_text is None or self._stops is None else "")
        parsed = self._parse(self._unread())
        if self._parser is not None:
            held = self._parser.finish()
            self._deltas += held
            parsed += held
        self.unusable = flaw(self.sampled)
        if not parsed and self._num_told < len(self._ids):
            parsed = [Delta()]
        return self._with_tokens(parsed)

    def reply(self, invocation_id: str, prompt_ids: tuple[int, ...], finish_reason: str) -> Reply:
        """The finished answer."""
        answer = join_deltas(self._deltas)
        sampled = self.sampled
        return Reply(
            invocation_id=invocation_id,
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            finish_reason="tool_calls" if answer.tool_calls and finish_reason == "stop" else finish_reason,
            prompt_ids=prompt_ids,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            num_cached_tokens=None if self._num_cached is None else min(self._num_cached, len(prompt_ids)),
            stop_text=self.stop_text,
            version_spans=sampled.version_spans,
        )

    def _spell(self) -> None:
        if self._unspelled:
            self._text.append(self._detokenizer.feed(self._unspelled))
            self._unspelled = []

    def _unread(self) -> str:
        self._spell()
        unread = "".join(self._text[self._num_read :])
        self._num_read = len(self._text)
        return unread

    def _parse(self, text: str) -> list[Delta]:
        if not text:
            return []
        parsed = [Delta(text=text)] if self._parser is None else self._parser.feed(text)
        self._deltas += parsed
        return parsed

    def _with_tokens(self, deltas: list[Delta]) -> list[Delta]:
        """The first delta gets the tokens that no delta had before."""
        if not deltas:
            return []
        start, self._num_told = self._num_told, len(self._ids)
        first = Delta(
            text=deltas[0].text,
            reasoning=deltas[0].reasoning,
            tool_call=deltas[0].tool_call,
            token_ids=tuple(self._ids[start:]),
            logprobs=tuple(self._logprobs[start:]),
        )
        return [first, *deltas[1:]]

    def _keep(self, sampled: Sampled, count: int) -> None:
        first, base = len(self._ids) - self._base, self._base
        last = first + count
        self._ids += sampled.token_ids[:count]
        self._logprobs += sampled.logprobs[:count]
        spans = sampled.version_spans
        if spans and spans[0][1] < first:  # told anew for earlier tokens as well
            first = spans[0][1]
            since = first + base
            self._spans = [(version, at, min(end, since)) for version, at, end in self._spans if at < since]
        for version, start, end in spans:
            start, end = max(start, first) + base, min(end, last) + base
            if start >= end:
                continue
            if self._spans and self._spans[-1][0] == version and self._spans[-1][2] == start:
                start = self._spans.pop()[1]
            self._spans.append((version, start, end))
