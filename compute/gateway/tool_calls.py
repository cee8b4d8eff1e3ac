"""Tool calls and thinking in the text that a model writes, found while it grows. Pure.

The format is `<think>…</think>` before the answer and any number of
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`. What is malformed stays text. Nothing that may still
become a marker is let out, so any cut of a text gives the same answer. Space beside a marker belongs to the
marker: clients drop or refuse texts that are only space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megloom.compute.gateway.protocol import Delta, ToolCall
from megloom.compute.gateway.stop_texts import beginning_at_end
from megloom.compute.graph.records import clean_text
from megloom.compute.graph.seeds import stable_id

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
ESCAPED = re.compile(r"\\.", re.DOTALL)
SPACE = " \t\r\n"  # JSON's own, and what templates put around markers


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A whole answer, parsed."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def call_id(invocation_id: str, position: int) -> str:
    """The id of a call's tool call number `position`: legal for every client, the same at every parse."""
    return f"call_{stable_id(invocation_id, position)[:24]}"


def parse_answer(
    text: str, invocation_id: str, *, in_reasoning: bool = False, has_tools: bool = True
) -> Answer:
    """A finished text at once; parameters as for `AnswerParser`."""
    parser = AnswerParser(invocation_id, in_reasoning=in_reasoning, has_tools=has_tools)
    return join_deltas([*parser.feed(text), *parser.finish()])


def join_deltas(deltas: Iterable[Delta]) -> Answer:
    """What a whole stream said."""
    deltas = list(deltas)
    return Answer(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(delta.tool_call for delta in deltas if delta.tool_call is not None),
    )


class AnswerParser:
    """Takes text as it comes. Deltas hold no tokens: who feeds knows where the text came from.

    `in_reasoning`: the prompt opened the thinking already. Without `has_tools` calls stay text: the client
    offered none and would not know what to do with one.
    """

    def __init__(self, invocation_id: str, *, in_reasoning: bool = False, has_tools: bool = True) -> None:
        self._invocation_id, self._has_tools = invocation_id, has_tools
        self._state = "reasoning" if in_reasoning else "text"
        self._held = ""  # not yet let out; in a call, all since the space before its opening marker
        self._body = 0  # where in `_held` the call's own text begins
        self._searched = 0  # and how far it was searched for the end of the call
        self._is_begun = in_reasoning  # thinking stands before everything else or nowhere
        self._skips_space = in_reasoning
        self._num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        """What the answer gains for sure."""
        self._held += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back. A call that never ended stays text, and what stands in it is parsed again."""
        deltas: list[Delta] = []
        while self._state == "call":
            self._give_up_call(deltas)
            while self._advance(deltas):
                pass
        self._emit(deltas, self._held)
        self._held = ""
        return deltas

    def _advance(self, deltas: list[Delta]) -> bool:
        """Passes on what is sure; True if a marker was taken, so that there may be more."""
        if self._skips_space and self._state != "call":
            self._held = self._held.lstrip(SPACE)
            self._skips_space = not self._held
        if self._state == "call":
            return self._advance_call(deltas)
        markers = self._markers()
        found = [(at, marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if not found:
            keep = len(self._held) - beginning_at_end(self._held, markers)
            keep = len(self._held[:keep].rstrip(SPACE))
            self._emit(deltas, self._held[:keep])
            self._held = self._held[keep:]
            return False
        at, marker = min(found)
        before = self._held[:at]
        if marker == THINK_OPEN and before.strip(SPACE):
            self._emit(deltas, before)  # and so the answer has begun: the rest is looked at again
            self._held = self._held[at:]
            return True
        start = len(before.rstrip(SPACE))
        self._emit(deltas, before[:start])
        if marker == CALL_OPEN:
            self._state = "call"
            self._held = self._held[start:]  # with the space before it, which is text if this is no call
            self._body = self._searched = at - start + len(marker)
        else:
            self._state = "reasoning" if marker == THINK_OPEN else "text"
            self._is_begun, self._skips_space = True, True
            self._held = self._held[at + len(marker) :]
        return True

    def _markers(self) -> tuple[str, ...]:
        if self._state == "reasoning":
            return (THINK_CLOSE,)
        return (THINK_OPEN,) * (not self._is_begun) + (CALL_OPEN,) * self._has_tools

    def _advance_call(self, deltas: list[Delta]) -> bool:
        end = self._held.find(CALL_CLOSE, self._searched)
        if end < 0:
            self._searched = max(self._searched, len(self._held) - len(CALL_CLOSE) + 1)
            return False
        body = self._held[self._body : end]
        if _ends_inside_text(body):  # an argument may speak of the marker
            self._searched = end + len(CALL_CLOSE)
            return True
        call = _read_call(body)
        if call is None:
            self._give_up_call(deltas)
            return True
        name, arguments = call
        tool_call = ToolCall(
            call_id=call_id(self._invocation_id, self._num_calls), name=name, arguments=arguments
        )
        self._num_calls += 1
        deltas.append(Delta(tool_call=tool_call))
        self._state, self._is_begun, self._skips_space = "text", True, True
        self._held = self._held[end + len(CALL_CLOSE) :]
        return True

    def _give_up_call(self, deltas: list[Delta]) -> None:
        """The opening marker was text; what follows it is parsed as if no call had begun."""
        self._state = "text"
        self._emit(deltas, self._held[: self._body])
        self._held = self._held[self._body :]

    def _emit(self, deltas: list[Delta], text: str) -> None:
        if not text:
            return
        if self._state == "reasoning":
            deltas.append(Delta(reasoning=text))
        else:
            self._is_begun = self._is_begun or bool(text.strip(SPACE))
            deltas.append(Delta(text=text))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read_call(body: str) -> tuple[str, str] | None:
    """The name and the arguments' own text; None where it is not one object with a name and an object."""
    try:
        members = _members(body.strip(SPACE))
        name = json.loads(members["name"])
    except (ValueError, LookupError, RecursionError):
        return None
    arguments = members.get("arguments", "{}")
    if not isinstance(name, str) or not name or not arguments.startswith("{"):
        return None
    return clean_text(name), arguments


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it was written. Raises: ValueError, IndexError."""
    members: dict[str, str] = {}
    at = _after(text, 0, "{")
    while text[at] != "}":
        if members:
            at = _after(text, at, ",")
        name, at = _DECODER.raw_decode(text, at)
        if not isinstance(name, str):
            raise ValueError("a member's name must be a text")
        start = _after(text, _skip_space(text, at), ":")
        _, at = _DECODER.raw_decode(text, start)
        members[name] = text[start:at]
        at = _skip_space(text, at)
    if at + 1 != len(text):
        raise ValueError("more than one object")
    return members


def _after(text: str, at: int, sign: str) -> int:
    if text[at] != sign:
        raise ValueError(f"expected {sign!r}")
    return _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at


def _ends_inside_text(body: str) -> bool:
    """Whether a JSON text that begins like `body` is inside a quoted text at its end."""
    return ESCAPED.sub("", body).count('"') % 2 == 1
