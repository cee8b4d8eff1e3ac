"""What an engine answers, read and checked: whole completions, streamed ones in pieces, error bodies.

Owns `Sampled`, a piece of an answer, and `AnswerReader`, which makes SGLang's server-sent events into pieces.
Ids, logprobs, counts and version spans of an answer agree, or it is refused. The client is the one caller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from megloom.compute.engines.protocol import (
    Completion,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    VersionSpan,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Tokens with the log-probabilities and version spans `[version, start, end)` that engines gave them.

    Spans that begin before a piece's own tokens replace all that were told since that place.
    `num_cached_tokens` of the prompt came from the engine's cache; None where it is not told.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version_spans: tuple[tuple[int, int, int], ...] = ()
    num_cached_tokens: int | None = None


Piece = tuple[Sampled, str | None]


def flaw(sampled: Sampled) -> str | None:
    """Why an answer cannot be trained on: how its parts disagree. None if they agree."""
    num_tokens, num_logprobs = len(sampled.token_ids), len(sampled.logprobs)
    if not num_tokens:
        return "the engine sampled no token"
    if num_logprobs != num_tokens:
        return f"{num_tokens} token ids came with {num_logprobs} log-probabilities"
    if not all(map(math.isfinite, sampled.logprobs)):
        return "a log-probability is not a finite number"
    end = 0
    for _, start, stop in sampled.version_spans:
        if start != end or stop <= start:
            break
        end = stop
    if end != num_tokens:
        return f"version spans {list(sampled.version_spans)} do not cover {num_tokens} tokens in order"
    return None


def error_message(body: bytes) -> str:
    """Returns the message of any of SGLang's error bodies: `error.message`, `error` or `message`."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:500]
    if isinstance(parsed, dict):
        error = parsed.get("error")
        found = error.get("message") if isinstance(error, dict) else error
        found = parsed.get("message") if found is None else found
        if found is not None:
            return str(found)
    return str(parsed)[:500]


def parse_version(text: Any, rid: str) -> int:
    """Returns a version off the wire, where it is a text, as a number."""
    try:
        return int(text)
    except (TypeError, ValueError):
        raise EngineProtocolError(f"rid={rid}: version {text!r} is not a whole number") from None


def parse_spans(meta: Mapping[str, Any], num_tokens: int, rid: str) -> tuple[VersionSpan, ...]:
    """Returns which version sampled which of the answer's tokens.

    Raises: EngineProtocolError if the spans do not cover them in order.
    """
    raw: Sequence[Mapping[str, Any]] | None = meta.get("weight_versions")
    if raw is None:  # SGLang reports spans only after an update that named a version
        raw = [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    spans = tuple(
        VersionSpan(version=parse_version(span["version"], rid), start=span["start"], end=span["end"])
        for span in raw
        if span["end"] > span["start"]
    )
    end = 0
    for span in spans:
        if span.start != end:
            raise EngineProtocolError(f"rid={rid}: version spans leave a gap or overlap: {spans}")
        end = span.end
    if end != num_tokens:
        raise EngineProtocolError(f"rid={rid}: version spans cover {end} of {num_tokens} tokens: {spans}")
    return spans


def decode_completion(body: bytes, request: GenerateRequest) -> Completion:
    """Returns the completion in a 200 answer to `/generate`.

    Raises: EngineProtocolError if its parts disagree, or an id or a logprob is no number.
    """
    rid = request.rid
    try:
        parsed = orjson.loads(body)
        meta = parsed["meta_info"]
        token_ids = tuple(parsed["output_ids"])
        triples = meta["output_token_logprobs"] if token_ids else ()
        logprobs = tuple(triple[0] for triple in triples)
        logprob_ids = tuple(triple[1] for triple in triples)
        counted = meta["completion_tokens"]
        finish_reason = FinishReason(meta["finish_reason"]["type"])
        if meta["id"] != rid:
            raise EngineProtocolError(f"rid={rid}: got the answer to {meta['id']!r}")
        if not len(token_ids) == len(logprobs) == counted or logprob_ids != token_ids:
            raise EngineProtocolError(
                f"rid={rid}: {len(token_ids)} ids, {len(logprobs)} logprobs and completion_tokens={counted} "
                "should agree, and the logprobs should name the same ids"
            )
        _check_sampled(token_ids, logprobs, rid)
        return Completion(
            rid=rid,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            version_spans=parse_spans(meta, len(token_ids), rid),
            cached_tokens=_num_cached(meta, rid),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise EngineProtocolError(f"rid={rid}: cannot read the answer ({error!r}): {body[:300]!r}") from error


def whole(completion: Completion) -> Piece:
    """Returns an answer as its only piece."""
    sampled = Sampled(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        version_spans=tuple((span.version, span.start, span.end) for span in completion.version_spans),
        num_cached_tokens=completion.cached_tokens,
    )
    return sampled, completion.finish_reason.value


class AnswerReader:
    """Reads the events of one streamed answer, fed as bytes in any cut.

    Events may be cumulative (SGLang's default) or hold only what is new; each is told by its own count.
    Spans count from the answer's first token. SGLang tells them with the last event only; until then an event
    names the version that is served, which is taken for the event's new tokens. If the last event says
    otherwise, its piece tells the spans of the whole answer; versions that an event has told never change.
    """

    def __init__(self, rid: str) -> None:
        self._rid = rid
        self._unread = b""
        self._num_tokens = 0
        self._spans: list[tuple[int, int, int]] = []
        self._is_assumed = False  # some of the spans are the served version's, not told as such
        self._is_finished = False

    def read(self, data: bytes) -> Iterator[Piece]:
        """Yields the pieces that `data` completes.

        Raises: EngineProtocolError, and EngineRefused or EngineUnavailable if the engine says so.
        """
        *events, self._unread = (self._unread + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            text = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if text and text != b"[DONE]" and (piece := self._piece(text)) is not None:
                yield piece

    def end(self) -> None:
        """The connection has closed.

        Raises: EngineUnavailable if the answer had not ended.
        """
        if not self._is_finished:
            raise EngineUnavailable(
                f"rid={self._rid}: the stream ended after {self._num_tokens} tokens without a finish reason"
            )

    def _piece(self, text: bytes) -> Piece | None:
        try:
            event = orjson.loads(text)
            if "error" in event:
                raise self._error(event["error"], text)
            meta = event["meta_info"]
            if meta["id"] != self._rid:
                raise EngineProtocolError(f"rid={self._rid}: got the answer to {meta['id']!r}")
            total, finish = meta["completion_tokens"], meta["finish_reason"]
            token_ids = self._new("output_ids", event["output_ids"], total)
            triples = self._new("output_token_logprobs", meta.get("output_token_logprobs") or (), total)
            if tuple(triple[1] for triple in triples) != tuple(token_ids):
                raise EngineProtocolError(f"rid={self._rid}: the logprobs name other ids than output_ids")
            logprobs = tuple(triple[0] for triple in triples)
            _check_sampled(token_ids, logprobs, self._rid)
            spans = self._new_spans(meta, total)
            reason = FinishReason(finish["type"]).value if finish is not None else None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineProtocolError(
                f"rid={self._rid}: cannot read the event ({error!r}): {text[:300]!r}"
            ) from error
        self._num_tokens = total
        self._is_finished = reason is not None
        if not token_ids and reason is None:
            return None
        sampled = Sampled(
            token_ids=tuple(token_ids),
            logprobs=logprobs,
            version_spans=spans,
            num_cached_tokens=_num_cached(meta, self._rid),
        )
        return sampled, reason

    def _new(self, what: str, entries: Sequence[Any], total: int) -> Sequence[Any]:
        """Returns the entries of tokens that no earlier event had."""
        num_new = total - self._num_tokens
        if len(entries) == total and num_new >= 0:
            return entries[self._num_tokens :]
        if len(entries) != num_new:
            raise EngineProtocolError(
                f"rid={self._rid}: {len(entries)} {what}, expected all {total} or the {num_new} new ones"
            )
        return entries

    def _new_spans(self, meta: Mapping[str, Any], total: int) -> tuple[tuple[int, int, int], ...]:
        """Returns the spans of the new tokens, or all if those of earlier ones were assumed wrongly."""
        first = self._num_tokens
        if meta.get("weight_versions") is None:
            self._is_assumed = True
            served = VersionSpan(
                version=parse_version(meta["weight_version"], self._rid), start=first, end=total
            )
            known = [
                VersionSpan(version=version, start=start, end=end) for version, start, end in self._spans
            ]
            self._spans = _clipped([*known, served], 0, total)
            return tuple(_clipped([served], first, total))
        spans = parse_spans(meta, total, self._rid)
        before, self._spans = self._spans, _clipped(spans, 0, total)
        if _clipped(spans, 0, first) == before:
            return tuple(_clipped(spans, first, total))
        if self._is_assumed:
            return tuple(self._spans)
        raise EngineProtocolError(
            f"rid={self._rid}: the versions of the first {first} tokens were {before}, now {spans}"
        )

    def _error(self, error: Any, text: bytes) -> Exception:
        code = error.get("code") if isinstance(error, dict) else None
        kind = EngineUnavailable if isinstance(code, int) and code >= 500 else EngineRefused
        return kind(f"rid={self._rid}: {error_message(text)}")


def _check_sampled(token_ids: Sequence[Any], logprobs: Sequence[Any], rid: str) -> None:
    """Refuses what no engine sampled: null is how JSON writes a logprob that is no number.

    Raises: EngineProtocolError naming the first.
    """
    if not {*map(type, token_ids)} <= {int}:  # bool is an int, too
        position, found = next((at, i) for at, i in enumerate(token_ids) if type(i) is not int)
        raise EngineProtocolError(f"rid={rid}: token {position} is {found!r}, expected an id")
    if not ({*map(type, logprobs)} <= {float, int} and all(map(math.isfinite, logprobs))):
        position, found = next(
            (at, p) for at, p in enumerate(logprobs) if type(p) not in (float, int) or not math.isfinite(p)
        )
        raise EngineProtocolError(
            f"rid={rid}: the logprob of token {position} is {found!r}, expected a finite number"
        )


def _num_cached(meta: Mapping[str, Any], rid: str) -> int | None:
    """The prompt's tokens that came from the engine's cache. Raises: EngineProtocolError if no number."""
    count = meta.get("cached_tokens")
    if count is not None and type(count) is not int:
        raise EngineProtocolError(f"rid={rid}: cached_tokens is {count!r}, expected a whole number")
    return count


def _clipped(spans: Sequence[VersionSpan], first: int, end: int) -> list[tuple[int, int, int]]:
    """The parts of the spans within `[first, end)`; neighbours of one version are one span."""
    clipped: list[tuple[int, int, int]] = []
    for span in spans:
        low, high = max(span.start, first), min(span.end, end)
        if low >= high:
            continue
        if clipped and clipped[-1][0] == span.version:
            clipped[-1] = (span.version, clipped[-1][1], high)
        else:
            clipped.append((span.version, low, high))
    return clipped
