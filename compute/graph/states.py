"""The life cycles of the graph's objects, and the one place that checks a move.

    invocation   BLOCKED → READY → RUNNING → DONE          a re-entered call goes RUNNING → READY
    episode      RUNNING → SCORED | UNSCORABLE | FAILED
    group        OPEN → COMPLETE | DISCARDED
    sample       READY → GRADIENT_TAKEN → APPLIED          a lost trainer sends GRADIENT_TAKEN → READY

"Gradient taken, update not applied" is a state of its own, so that a retry never counts a sample twice
(FlexMARL's `read_not_updated`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class InvocationState(StrEnum):
    BLOCKED = "blocked"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EpisodeState(StrEnum):
    RUNNING = "running"
    SCORED = "scored"
    UNSCORABLE = "unscorable"
    FAILED = "failed"


class GroupState(StrEnum):
    OPEN = "open"
    COMPLETE = "complete"
    DISCARDED = "discarded"


class SampleState(StrEnum):
    READY = "ready"
    GRADIENT_TAKEN = "gradient_taken"
    APPLIED = "applied"
    DROPPED = "dropped"


State = TypeVar("State", InvocationState, EpisodeState, GroupState, SampleState)

_I, _E, _G, _S = InvocationState, EpisodeState, GroupState, SampleState
# By type first: members of different enums with the same text are equal, and would share an entry.
LEGAL_MOVES: Mapping[type[StrEnum], Mapping[StrEnum, frozenset[StrEnum]]] = {
    _I: {
        _I.BLOCKED: frozenset({_I.READY, _I.FAILED, _I.CANCELLED}),
        _I.READY: frozenset({_I.RUNNING, _I.FAILED, _I.CANCELLED}),
        _I.RUNNING: frozenset({_I.DONE, _I.READY, _I.FAILED, _I.CANCELLED}),
    },
    _E: {_E.RUNNING: frozenset({_E.SCORED, _E.UNSCORABLE, _E.FAILED})},
    _G: {_G.OPEN: frozenset({_G.COMPLETE, _G.DISCARDED})},
    _S: {
        _S.READY: frozenset({_S.GRADIENT_TAKEN, _S.DROPPED}),
        _S.GRADIENT_TAKEN: frozenset({_S.APPLIED, _S.READY}),
    },
}


class IllegalMove(Exception):
    """A state change that the table of legal moves does not list."""


def checked_move(object_id: str, old: State, new: State) -> State:
    """Returns `new`.

    Raises: IllegalMove, naming the object, if `old → new` is not a legal move.
    """
    legal = LEGAL_MOVES[type(old)].get(old, frozenset())
    if new not in legal:
        allowed = ", ".join(sorted(legal)) or "none, it is final"
        raise IllegalMove(f"{object_id}: {old} → {new} is not a legal move (allowed: {allowed})")
    return new
