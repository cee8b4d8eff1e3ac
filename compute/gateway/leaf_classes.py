"""Whose work a call is: the main agent's, a helper's, or a summary of either. Pure heuristics.

`rollout/samples.py` ranks leaves by these classes. Clients do not say what a call is for, so a classifier
guesses from what the request shows. One object sees the calls of one episode attempt in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megloom.compute.gateway.messages import plain_messages

LeafClass = Literal["main", "main-summary", "sub-agent", "sub-agent-summary"]

# What requests to sum a conversation up say, in lower case. They stand in the last user message or the system
# prompt, among much else, so whole phrases only.
SUMMARY_PHRASES = (
    "create a detailed summary of the conversation",
    "summary of the conversation so far",
    "summarize the conversation",
    "summarizing conversations",
    "summarise the conversation",
)
# Programs write the date, the folder and the like further down in their system prompt.
OPENING_CHARS = 400


class LeafClassifier(Protocol):
    """Told of each call of an episode attempt once, in order; `position` counts them from 0."""

    def classify(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        position: int,
    ) -> LeafClass:
        """The class of the leaf that the call would be."""
        ...


class AllMain:
    """Every call is the main agent's: right for programs without helpers, and for workflows."""

    def classify(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        position: int,
    ) -> LeafClass:
        return "main"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """What tells one agent of a program from another. `task` is a digest of its first user message."""

    opening: str
    tools: frozenset[str]
    task: bytes


class CodingHarness:
    """For programs with one main agent that starts helpers and sums long conversations up.

    - The main agent is who makes the first call that offers tools; calls before it that offer none (a title,
      a check of the quota) are a helper's.
    - A call with the same opening of its system prompt and all of the main agent's tools is the main agent's,
      so it may gain tools. Other calls are a sub-agent's.
    - A call whose last user message or system prompt asks to sum the conversation up is a summary. Programs
      change the system prompt and the tools for it; it is of the main conversation if it begins with the same
      user message.
    """

    def __init__(self) -> None:
        self._main: _Look | None = None

    def classify(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        position: int,
    ) -> LeafClass:
        plain = plain_messages(messages)
        look = _look(plain, tools)
        if self._main is None and look.tools:
            self._main = look
        is_main = self._main is not None and _is_same(look, self._main)
        if _asks_for_summary(plain):
            is_main = is_main or (self._main is not None and look.task == self._main.task)
            return "main-summary" if is_main else "sub-agent-summary"
        return "main" if is_main else "sub-agent"


CLASSIFIERS: dict[str, Callable[[], LeafClassifier]] = {
    "all_main": AllMain,
    "coding_harness": CodingHarness,
}


def _look(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> _Look:
    first_user = next((message["content"] for message in messages if message["role"] == "user"), "")
    task = hashlib.blake2b(first_user.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    names = (tool.get("function", tool).get("name") for tool in tools)
    return _Look(
        opening=_system(messages)[:OPENING_CHARS],
        tools=frozenset(name for name in names if isinstance(name, str)),
        task=task,
    )


def _is_same(look: _Look, main: _Look) -> bool:
    return look.opening == main.opening and look.tools >= main.tools


def _system(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(message["content"] for message in messages if message["role"] == "system")


def _asks_for_summary(messages: Sequence[Mapping[str, Any]]) -> bool:
    last = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    asked = f"{_system(messages)}\n{last}".lower()
    return any(phrase in asked for phrase in SUMMARY_PHRASES)
