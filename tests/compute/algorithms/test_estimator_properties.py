"""What must hold for every algorithm, whatever the rewards and however ragged the groups."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megloom.compute.algorithms.base import Outcome, PolicyGradient
from megloom.compute.algorithms.table import ALGORITHMS, parse_algorithm
from tests.compute.algorithms.outcomes import outcome, outcomes_of

GROUP_RELATIVE: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "grpo", "normalise": "none"},
    {"name": "rloo"},
    {"name": "dapo"},
    {"name": "dr_mas"},
    {"name": "dr_mas", "weigh": "calls"},
    {"name": "hierarchical_grpo"},
    {"name": "hierarchical_grpo", "normalise": "none"},
]
WHITENED: list[dict[str, Any]] = [
    {"name": "reinforce_pp"},
    {"name": "reinforce_pp", "baseline": "group"},
    {"name": "reinforce_pp", "baseline": "group", "baseline_per": "round"},
]
SHIFTED = [*GROUP_RELATIVE, *WHITENED]
ALL = [*SHIFTED, {"name": "rae"}, {"name": "ppo"}]
SCALED = [knobs for knobs in SHIFTED if knobs.get("normalise") != "none" and knobs["name"] != "rloo"]

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=1, max_size=7)
FEW = settings(max_examples=20, deadline=None)  # for each of a dozen algorithms
ragged = st.dictionaries(st.sampled_from("abcde"), rewards, min_size=1, max_size=5)


def each(knobs: list[dict[str, Any]]) -> Any:
    names = ["-".join(map(str, values.values())) for values in knobs]
    return pytest.mark.parametrize("algorithm", [parse_algorithm(values) for values in knobs], ids=names)


def with_lengths(outcomes: list[Outcome], seed: int) -> list[Outcome]:
    dice = random.Random(seed)
    return [
        outcome(o.reward, int(o.key.rpartition("m")[2]), o.group_id, num_tokens=dice.randrange(1, 9))
        for o in outcomes
    ]


def test_every_algorithm_of_the_table_is_in_these_tests() -> None:
    assert {knobs["name"] for knobs in ALL} == set(ALGORITHMS)


@each(ALL)
@FEW
@given(groups=ragged, seed=st.integers(0, 99))
def test_the_order_of_outcomes_does_not_matter_to_the_last_bit(
    algorithm: PolicyGradient, groups: dict[str, list[float]], seed: int
) -> None:
    outcomes = with_lengths(outcomes_of(groups), seed)
    order = list(range(len(outcomes)))
    random.Random(seed).shuffle(order)
    plain = algorithm.estimate(outcomes, {"solver": 0.3})
    assert algorithm.estimate([outcomes[i] for i in order], {"solver": 0.3}) == [plain[i] for i in order]
    shuffled = [outcomes[i] for i in order]
    assert algorithm.next_state(shuffled, {"solver": 0.3}) == algorithm.next_state(outcomes, {"solver": 0.3})


@each(GROUP_RELATIVE)
@FEW
@given(groups=ragged)
def test_the_advantages_of_each_group_sum_to_zero(
    algorithm: PolicyGradient, groups: dict[str, list[float]]
) -> None:
    outcomes = outcomes_of(groups)
    found = algorithm.estimate(outcomes, {})
    for group in groups:
        own = [a for a, o in zip(found, outcomes, strict=True) if o.group_id == group]
        assert math.fsum(own) == pytest.approx(0.0, abs=1e-9)


@each(WHITENED)
@FEW
@given(groups=ragged, seed=st.integers(0, 99))
def test_whitened_advantages_have_mean_0_and_variance_1_over_the_tokens(
    algorithm: PolicyGradient, groups: dict[str, list[float]], seed: int
) -> None:
    outcomes = with_lengths(outcomes_of(groups), seed)
    found = algorithm.estimate(outcomes, {})
    used = [
        (a, o.num_tokens)
        for a, o in zip(found, outcomes, strict=True)
        if len(groups[o.group_id]) >= algorithm.smallest_group
    ]
    assume(all(len(found) == 1 or max(found) - min(found) > 0.1 for found in groups.values()))
    assume(max((abs(a) for a, _ in used), default=0.0) > 0.1)
    total = sum(n for _, n in used)
    assert math.fsum(a * n for a, n in used) == pytest.approx(0.0, abs=1e-6 * total)
    assert math.fsum(a * a * n for a, n in used) / (total - 1) == pytest.approx(1.0, abs=0.02)


@each(SHIFTED)
@FEW
@given(groups=ragged, shift=st.floats(-100, 100), seed=st.integers(0, 99))
def test_a_shift_of_all_rewards_changes_nothing(
    algorithm: PolicyGradient, groups: dict[str, list[float]], shift: float, seed: int
) -> None:
    assume(all(len(set(found)) == 1 or max(found) - min(found) > 1e-2 for found in groups.values()))
    moved = {group: [reward + shift for reward in found] for group, found in groups.items()}
    plain = algorithm.estimate(with_lengths(outcomes_of(groups), seed), {})
    shifted = algorithm.estimate(with_lengths(outcomes_of(moved), seed), {})
    assert shifted == pytest.approx(plain, abs=1e-4)


@each(SCALED)
@FEW
@given(groups=ragged, scale=st.floats(0.5, 100), seed=st.integers(0, 99))
def test_a_scale_of_all_rewards_changes_nothing_where_the_deviation_divides(
    algorithm: PolicyGradient, groups: dict[str, list[float]], scale: float, seed: int
) -> None:
    assume(all(len(set(found)) == 1 or max(found) - min(found) > 1e-1 for found in groups.values()))
    scaled = {group: [reward * scale for reward in found] for group, found in groups.items()}
    plain = algorithm.estimate(with_lengths(outcomes_of(groups), seed), {})
    found = algorithm.estimate(with_lengths(outcomes_of(scaled), seed), {})
    assert found == pytest.approx(plain, rel=2e-3, abs=1e-6)


@each(SHIFTED)
@pytest.mark.parametrize("reward", [0.0, 0.7, -3.0, 1e30])
def test_equal_outcomes_give_exact_zeros(algorithm: PolicyGradient, reward: float) -> None:
    outcomes = with_lengths(outcomes_of({"a": [reward] * 7, "b": [reward] * 3}), 0)
    assert algorithm.estimate(outcomes, {}) == [0.0] * 10


@each(SHIFTED)
def test_float32_noise_on_equal_outcomes_is_no_signal(algorithm: PolicyGradient) -> None:
    outcomes = outcomes_of({"a": [0.699999988079071, 0.7, 0.7, 0.7000000476837158]})
    assert algorithm.estimate(outcomes, {}) == [0.0] * 4


@each(GROUP_RELATIVE)
def test_one_member_alone_has_exactly_0_and_moves_nobody(algorithm: PolicyGradient) -> None:
    pair = outcomes_of({"pair": [1.0, 0.0]})
    with_single = algorithm.estimate([*pair, *outcomes_of({"single": [9.0]})], {})
    assert with_single == [*algorithm.estimate(pair, {}), 0.0]


@each(SHIFTED)
def test_the_scale_of_one_agents_rewards_does_not_touch_another(algorithm: PolicyGradient) -> None:
    solver = outcomes_of({"a": [1.0, 0.0, 0.5], "b": [0.0, 1.0]})
    for scale in (1.0, 100.0):
        planner = outcomes_of({"a": [scale, 0.0, -scale], "b": [0.0, scale]}, agent="planner")
        both = algorithm.estimate([*solver, *planner], {})
        assert both[: len(solver)] == algorithm.estimate(solver, {})


@each([knobs for knobs in GROUP_RELATIVE if knobs.get("weigh") != "calls"])
def test_a_member_with_more_turns_weighs_the_same(algorithm: PolicyGradient) -> None:
    few = outcomes_of({"a": [1.0, 0.0, 0.0]}, num_calls=1)
    many = [outcome(1.0, 0, "a", num_calls=9, num_tokens=99), *few[1:]]
    assert algorithm.estimate(many, {}) == algorithm.estimate(few, {})


@each(ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_outcome_that_nobody_could_score_is_refused(algorithm: PolicyGradient, bad: float) -> None:
    with pytest.raises(ValueError, match="reward 1 of the scope is"):
        algorithm.estimate(outcomes_of({"a": [1.0, bad]}), {})


@each(ALL)
def test_no_outcome_at_all_is_no_error(algorithm: PolicyGradient) -> None:
    assert algorithm.estimate([], {}) == []
    assert algorithm.next_state([], {"solver": 0.5}) == {"solver": 0.5}


@each([*GROUP_RELATIVE, *WHITENED[1:]])
def test_a_group_below_the_minimum_leaves_before_any_statistic(algorithm: PolicyGradient) -> None:
    strict = algorithm.model_copy(update={"min_group_size": 3})
    large, small = outcomes_of({"large": [1.0, 0.0, 0.5]}), outcomes_of({"small": [7.0, -7.0]})
    assert strict.estimate([*large, *small], {}) == [*strict.estimate(large, {}), 0.0, 0.0]
