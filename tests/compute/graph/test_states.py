from __future__ import annotations

from enum import StrEnum
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.graph.states import (
    EpisodeState,
    GroupState,
    IllegalMove,
    InvocationState,
    SampleState,
    checked_move,
)

# The life cycles once more, by hand and as text: members of different enums with one text are equal.
MOVES: dict[type[StrEnum], dict[str, str]] = {
    InvocationState: {
        "blocked": "ready failed cancelled",
        "ready": "running failed cancelled",
        "running": "done ready failed cancelled",
        "done": "",
        "failed": "",
        "cancelled": "",
    },
    EpisodeState: {"running": "scored unscorable failed", "scored": "", "unscorable": "", "failed": ""},
    GroupState: {"open": "complete discarded", "complete": "", "discarded": ""},
    SampleState: {
        "ready": "gradient_taken dropped",
        "gradient_taken": "applied ready",
        "applied": "",
        "dropped": "",
    },
}
PAIRS = [pair for kind in MOVES for pair in product(kind, kind)]
FINAL = [state for kind in MOVES for state in kind if not MOVES[kind][state]]


def name(value: Any) -> str:
    return f"{type(value).__name__}-{value}"


def allowed(state: Any) -> list[Any]:
    return [type(state)(new) for new in MOVES[type(state)][state].split()]


@pytest.mark.parametrize("kind", MOVES)
def test_the_life_cycle_knows_every_state(kind: type[StrEnum]) -> None:
    assert set(MOVES[kind]) == {str(state) for state in kind}


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=name)
def test_a_move_passes_exactly_if_the_life_cycle_has_it(old: Any, new: Any) -> None:
    if new in allowed(old):
        assert checked_move("x1", old, new) is new
    else:
        with pytest.raises(IllegalMove, match="x1"):
            checked_move("x1", old, new)


@pytest.mark.parametrize("state", FINAL, ids=name)
def test_a_final_state_says_so(state: Any) -> None:
    with pytest.raises(IllegalMove, match=r"x1: .* \(allowed: none, it is final\)"):
        checked_move("x1", state, state)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_sample_is_applied_once_and_only_after_its_gradient_was_taken(data: st.DataObject) -> None:
    state, history = SampleState.READY, [SampleState.READY]
    while (moves := allowed(state)) and len(history) < 12:
        state = checked_move("s1", state, data.draw(st.sampled_from(moves)))
        history.append(state)
    if SampleState.APPLIED in history:
        at = history.index(SampleState.APPLIED)
        assert history[at - 1] is SampleState.GRADIENT_TAKEN
        assert history.count(SampleState.APPLIED) == 1


def test_the_error_names_the_object_the_move_and_what_is_allowed() -> None:
    with pytest.raises(IllegalMove, match="call 7: blocked → done is not a legal move") as caught:
        checked_move("call 7", InvocationState.BLOCKED, InvocationState.DONE)
    assert "cancelled, failed, ready" in str(caught.value)
