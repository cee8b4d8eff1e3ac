"""Hand-computed cases of what sets each algorithm apart."""

from __future__ import annotations

import math

import pytest

from megloom.compute.algorithms.base import Outcome, Overlong, PolicyGradient
from megloom.compute.algorithms.dapo import Dapo
from megloom.compute.algorithms.dr_mas import DrMas
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.hierarchical_grpo import HierarchicalGrpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.algorithms.rae import Rae
from megloom.compute.algorithms.reinforce_pp import ReinforcePlusPlus
from megloom.compute.algorithms.rloo import Rloo
from tests.compute.algorithms.outcomes import outcome, outcomes_of


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    assert Rloo().estimate(outcomes_of({"g": [3.0, 1.0, 2.0]}), {}) == pytest.approx([1.5, -1.5, 0.0])


def test_a_baseline_per_round_compares_calls_of_the_same_turn() -> None:
    calls = [
        outcome(reward, member, key=f"m{member}-i{turn}", round=turn)
        for member, turns in enumerate([(1.0, 5.0), (0.0, 7.0)])
        for turn, reward in enumerate(turns)
    ]
    per_round = Grpo(normalise="none", baseline_per="round")
    assert per_round.estimate(calls, {}) == [0.5, -1.0, -0.5, 1.0]
    assert Grpo(normalise="none").estimate(calls, {}) == [-2.25, 1.75, -3.25, 3.75]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (90, 1.0), (95, 1.5), (100, 2.0), (120, 2.0)]
)
def test_the_overlong_penalty_rises_over_its_buffer(num_tokens: int, penalty: float) -> None:
    assert Overlong(buffer_tokens=20, penalty=2.0).of(num_tokens, 100) == penalty


def test_dapo_filters_by_the_raw_reward_and_grpo_by_the_penalised_one() -> None:
    """Both answers are right, one is overlong: DAPO drops the group, GRPO teaches it to be short."""
    overlong = Overlong(buffer_tokens=10)
    outcomes = [outcome(1.0, 0, num_tokens=10, limit_tokens=64), outcome(1.0, 1, num_tokens=64)]
    assert Dapo(overlong=overlong).estimate(outcomes, {}) == [0.0, 0.0]
    assert Grpo(overlong=overlong, normalise="none").estimate(outcomes, {}) == [0.5, -0.5]


def test_dapo_penalises_overlong_answers_of_the_groups_that_it_keeps() -> None:
    outcomes = [outcome(1.0, 0), outcome(1.0, 1, num_tokens=64), outcome(0.0, 2)]
    shaped = Dapo(overlong=Overlong(buffer_tokens=10)).estimate(outcomes, {})
    assert shaped == pytest.approx(Grpo().advantages([1.0, 0.0, 0.0]))


def test_dr_mas_over_calls_counts_an_outcome_as_often_as_the_agent_was_called() -> None:
    outcomes = [outcome(1.0, 0, num_calls=3), outcome(0.0, 1, num_calls=1)]
    deviation = math.sqrt((3 * 0.0625 + 0.5625) / 3)
    expected = [0.25 / (deviation + 1e-6), -0.75 / (deviation + 1e-6)]
    assert DrMas(weigh="calls").estimate(outcomes, {}) == pytest.approx(expected)
    assert DrMas().estimate(outcomes, {}) == pytest.approx(Grpo().advantages([1.0, 0.0]))


def round_of_two_in_a_group_of_eight() -> list[Outcome]:
    """Eight first turns, two of which had a second one."""
    first = [outcome(float(member % 3), member, key=f"m{member}-i0") for member in range(8)]
    second = [outcome(float(member), member, key=f"m{member}-i1", round=1, num_calls=3) for member in (0, 1)]
    return [*first, *second]


@pytest.mark.parametrize(
    "algorithm",
    [
        Grpo(baseline_per="round", min_group_size=4),
        DrMas(baseline_per="round", min_group_size=4),
        DrMas(baseline_per="round", min_group_size=4, weigh="calls"),
        ReinforcePlusPlus(baseline="group", baseline_per="round", min_group_size=4),
    ],
    ids=["grpo", "dr_mas", "dr_mas over calls", "reinforce_pp"],
)
def test_a_round_below_the_minimum_has_exact_zeros_and_moves_nobody(algorithm: PolicyGradient) -> None:
    outcomes = round_of_two_in_a_group_of_eight()
    found = algorithm.estimate(outcomes, {})
    assert found[8:] == [0.0, 0.0] and all(found[:8])
    assert found[:8] == algorithm.estimate(outcomes[:8], {})


def turns(rewards: list[list[float]]) -> list[Outcome]:
    return [
        outcome(reward, member, key=f"m{member}-i{turn}", round=turn)
        for member, found in enumerate(rewards)
        for turn, reward in enumerate(found)
    ]


def test_hierarchical_advantages_are_the_episodes_plus_the_rounds() -> None:
    """Episode 1 has one turn: it weighs as much as episode 0, and round 1 has only one call."""
    algorithm = HierarchicalGrpo(normalise="none", round_weight=0.5)
    found = algorithm.estimate(turns([[1.0, 0.5], [0.25]]), {})
    episodes = [0.75 - 0.5, 0.25 - 0.5]
    assert found == pytest.approx(
        [episodes[0] + 0.5 * (1.0 - 0.625), episodes[0], episodes[1] + 0.5 * (0.25 - 0.625)]
    )


def test_hierarchical_advantages_of_a_shared_reward_are_those_of_grpo() -> None:
    outcomes = outcomes_of({"g": [1.0, 0.0, 0.0]})
    assert HierarchicalGrpo().estimate(outcomes, {}) == Grpo().estimate(outcomes, {})


def test_reinforce_pp_weighs_outcomes_by_their_tokens() -> None:
    """Three tokens of reward 1 and one of 0: mean 3/4, variance 1/4."""
    outcomes = [outcome(1.0, 0, num_tokens=3), outcome(0.0, 1, num_tokens=1)]
    assert ReinforcePlusPlus().estimate(outcomes, {}) == pytest.approx([0.5, -1.5])


def test_reinforce_pp_looks_over_the_borders_of_groups_of_one() -> None:
    outcomes = outcomes_of({"a": [1.0], "b": [0.0]}, num_tokens=1)
    assert ReinforcePlusPlus().estimate(outcomes, {}) == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)])
    assert ReinforcePlusPlus(baseline="group").estimate(outcomes, {}) == [0.0, 0.0]


def test_reinforce_pp_may_take_each_rounds_own_mean_off() -> None:
    """Rounds of unlike scale: per agent the round decides the sign, per round the member does."""
    outcomes = turns([[1.0, 10.0], [0.0, 12.0]])
    per_round = ReinforcePlusPlus(baseline="group", baseline_per="round")
    deviation = math.sqrt(4 * (0.5**2 + 1 + 0.5**2 + 1) / 15 + 1e-8)  # of four tokens each
    expected = [part / deviation for part in (0.5, -1.0, -0.5, 1.0)]
    assert per_round.estimate(outcomes, {}) == pytest.approx(expected)
    per_agent = ReinforcePlusPlus(baseline="group").estimate(outcomes, {})
    assert [advantage > 0 for advantage in per_agent] == [False, True, False, True]


def test_rounds_without_a_group_baseline_are_refused() -> None:
    with pytest.raises(ValueError, match="baseline_per 'round' with baseline 'none': set baseline"):
        ReinforcePlusPlus(baseline_per="round")


def test_an_outcome_whose_tokens_are_all_untrained_does_not_count_in_the_whitening() -> None:
    outcomes = [outcome(1.0, 0), outcome(0.0, 1), outcome(50.0, 2, num_tokens=0)]
    assert ReinforcePlusPlus().estimate(outcomes, {})[:2] == ReinforcePlusPlus().estimate(outcomes[:2], {})


def test_the_running_baseline_stands_within_a_step_and_moves_at_its_end() -> None:
    algorithm, state = Rae(decay=0.5), {"solver": 0.4}
    outcomes = outcomes_of({"a": [1.0, 0.0], "b": [1.0, 0.0]})
    assert algorithm.estimate(outcomes, state) == pytest.approx([0.6, -0.4, 0.6, -0.4])
    assert algorithm.next_state(outcomes, state) == {"solver": pytest.approx(0.4 / 16 + 15 / 16 * 0.5)}


def test_the_running_baseline_of_equal_rewards_is_that_of_the_moving_one() -> None:
    algorithm, moving = Rae(decay=0.9), 0.2
    for _ in range(5):
        moving = 0.9 * moving + 0.1 * 0.7
    after = algorithm.next_state(outcomes_of({"a": [0.7] * 5}), {"solver": 0.2})
    assert after == {"solver": pytest.approx(moving)}


def test_each_role_has_a_running_baseline_of_its_own() -> None:
    algorithm = Rae(decay=0.0)
    outcomes = [*outcomes_of({"a": [1.0]}, agent="white"), *outcomes_of({"a": [-1.0]}, agent="black")]
    state = algorithm.next_state(outcomes, {"referee": 0.1})
    assert state == {"white": 1.0, "black": -1.0, "referee": 0.1}
    assert algorithm.estimate(outcomes, state) == [0.0, 0.0]


def test_a_critic_spreads_the_reward_over_the_tokens_by_their_values() -> None:
    """γ = 1, λ = 0: each advantage is the next value less its own, the last the reward less its own."""
    found = Ppo(gamma=1.0, lam=0.0).columns(1.0, [0.2, 0.5, 0.9])
    assert found["advantages"] == pytest.approx([0.3, 0.4, 0.1])
    assert found["returns"] == pytest.approx([0.5, 0.9, 1.0])


def test_a_critic_asks_for_values_and_with_a_kl_term_for_the_reference_too() -> None:
    with_kl = Ppo.parse({"kl": {"coefficient": 0.1}})
    assert (Ppo().wants, with_kl.wants) == (("values",), ("values", "reference_logprobs"))
    assert Ppo().has_critic and not Grpo().has_critic


def test_a_perfect_critic_leaves_no_advantage() -> None:
    assert Ppo().columns(1.0, [1.0, 1.0, 1.0])["advantages"] == [0.0, 0.0, 0.0]
