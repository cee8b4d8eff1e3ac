"""Whether a call was scored for itself or has its agent's or team's reward: one outcome or many."""

from __future__ import annotations

from typing import Any

import pytest

from megloom.compute.rewards.scoring import names_call
from megloom.compute.workload import Score


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (1.0, False),
        ({"solver": 1.0}, False),
        ({"g-i0": 1.0}, True),
        ({"solver": 1.0, "g-i0": None}, True),
        (Score(team=1.0), False),
        (Score(team=1.0, agents={"solver": 1.0}), False),
        (Score(team=1.0, calls={"g-i1": 0.0}), False),
        (Score(team=1.0, calls={"g-i0": 0.0}), True),
    ],
)
def test_a_call_inherits_unless_the_reward_function_names_it(value: Any, named: bool) -> None:
    assert names_call(value, "g-i0") is named
