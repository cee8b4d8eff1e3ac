"""From a reward function's value to one value per call."""

from __future__ import annotations

import math

import pytest

from megloom.compute.rewards.scoring import RewardError, normalise
from megloom.compute.workload import Score

CALLS = {"i0": "planner", "i1": "solver", "i2": "solver"}


def test_a_number_is_every_calls_reward() -> None:
    assert normalise(0.5, calls=CALLS).calls == {"i0": 0.5, "i1": 0.5, "i2": 0.5}


def test_an_agents_reward_goes_to_its_calls() -> None:
    score = normalise({"planner": 0.0, "solver": 1.0}, calls=CALLS)
    assert score.calls == {"i0": 0.0, "i1": 1.0, "i2": 1.0}


def test_a_calls_own_reward_comes_before_its_agents() -> None:
    score = normalise(Score(team=1.0, agents={"solver": 0.5}, calls={"i2": 0.0}), calls=CALLS)
    assert score.calls == {"i0": 1.0, "i1": 0.5, "i2": 0.0}


def test_a_call_that_nobody_could_score_is_none_and_never_zero() -> None:
    score = normalise(Score(team=1.0, calls={"i1": None, "i2": math.nan}), calls=CALLS)
    assert score.calls["i1"] is None and score.calls["i2"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, "good", None, {}, {"nobody": 1.0}])
def test_what_is_no_reward_is_an_error_with_the_cause(value: object) -> None:
    with pytest.raises(RewardError):
        normalise(value, calls=CALLS)
