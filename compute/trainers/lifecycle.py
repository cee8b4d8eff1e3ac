"""The life of a policy's training group, and the one place that checks a move.

    INACTIVE ─▶ BIND ─▶ LOAD ─▶ COMPUTE ─▶ OFFLOAD ─▶ DESTROYED ─▶ BIND ─▶ …

BIND waits for a trainer cell and starts the process, LOAD reads weights and state, COMPUTE takes verbs,
OFFLOAD writes the full state (back to COMPUTE if it cannot); DESTROYED has neither process nor cell, and is
where a lost process leads from anywhere. Version 0 is made between BIND and DESTROYED, by a process that
loads nothing.
Source: FlexMARL's agent-level training groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from megloom.compute.graph.states import IllegalMove


class GroupLife(StrEnum):
    INACTIVE = "inactive"
    BIND = "bind"
    LOAD = "load"
    COMPUTE = "compute"
    OFFLOAD = "offload"
    DESTROYED = "destroyed"


_L = GroupLife
LEGAL_MOVES: Mapping[GroupLife, frozenset[GroupLife]] = {
    _L.INACTIVE: frozenset({_L.BIND, _L.DESTROYED}),
    _L.BIND: frozenset({_L.LOAD, _L.DESTROYED}),
    _L.LOAD: frozenset({_L.COMPUTE, _L.DESTROYED}),
    _L.COMPUTE: frozenset({_L.LOAD, _L.OFFLOAD, _L.DESTROYED}),
    _L.OFFLOAD: frozenset({_L.DESTROYED, _L.COMPUTE}),
    _L.DESTROYED: frozenset({_L.BIND, _L.DESTROYED}),
}


def checked_move(policy: str, old: GroupLife, new: GroupLife) -> GroupLife:
    """Returns `new`.

    Raises: IllegalMove, naming the policy, if `old → new` is not a legal move.
    """
    if new not in LEGAL_MOVES[old]:
        allowed = ", ".join(sorted(LEGAL_MOVES[old]))
        raise IllegalMove(f"trainers of {policy}: {old} → {new} is not a legal move (allowed: {allowed})")
    return new
