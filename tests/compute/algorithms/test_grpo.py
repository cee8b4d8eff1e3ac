"""Advantages: golden numbers, and what must hold for every group."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megloom.compute.algorithms.grpo import Grpo

GOLDEN = json.loads((Path(__file__).parent / "golden_advantages.json").read_text())
rewards_G = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=17)


def has_spread(rewards: list[float]) -> bool:
    return max(rewards) - min(rewards) > 1e-2


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_advantages_equal_those_of_published_trainers(normalise: str) -> None:
    algorithm = Grpo.parse({"normalise": normalise})
    ours = [algorithm.advantages(group) for group in GOLDEN["groups"]]
    assert list(itertools.chain(*ours)) == pytest.approx(GOLDEN[normalise], abs=2e-6)


def test_two_members_are_one_over_root_two_apart_from_zero() -> None:
    assert Grpo().advantages([1.0, 0.0]) == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], abs=1e-5)


@given(rewards_G)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    for algorithm in (Grpo(), Grpo(normalise="none")):
        assert math.fsum(algorithm.advantages(rewards)) == pytest.approx(0.0, abs=1e-9)


@given(rewards_G, st.floats(-100, 100))
def test_a_shift_of_all_rewards_changes_nothing(rewards: list[float], shift: float) -> None:
    assume(has_spread(rewards))
    shifted = [reward + shift for reward in rewards]
    assert Grpo().advantages(shifted) == pytest.approx(Grpo().advantages(rewards), abs=1e-6)


@given(rewards_G, st.floats(0.5, 100))
def test_a_scale_of_all_rewards_changes_nothing_under_std(rewards: list[float], scale: float) -> None:
    assume(has_spread(rewards))
    scaled = [reward * scale for reward in rewards]
    assert Grpo().advantages(scaled) == pytest.approx(Grpo().advantages(rewards), rel=2e-3)


@given(rewards_G, st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter_to_the_last_bit(rewards: list[float], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    plain, shuffled = Grpo().advantages(rewards), Grpo().advantages([rewards[i] for i in order])
    assert shuffled == [plain[i] for i in order]


@given(rewards_G)
def test_a_better_reward_never_has_a_lower_advantage(rewards: list[float]) -> None:
    pairs = sorted(zip(rewards, Grpo().advantages(rewards), strict=True))
    assert all(low[1] <= high[1] for low, high in itertools.pairwise(pairs))


@pytest.mark.parametrize(
    "rewards",
    [
        [0.7] * 7,
        [0.0] * 5,
        [-3.0, -3.0],
        [0.1 + 0.2, 0.3, 0.3],
        [0.699999988079071, 0.7, 0.7, 0.7000000476837158],  # 0.7 through float32 and back
        [1e30, 1e30],
    ],
)
def test_equal_rewards_give_exact_zeros(rewards: list[float]) -> None:
    assert Grpo().advantages(rewards) == [0.0] * len(rewards)
    assert Grpo(normalise="none").advantages(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_group_below_the_minimum_size_gives_exact_zeros(size: int) -> None:
    rewards = [float(i) for i in range(size)]
    assert Grpo(min_group_size=4).advantages(rewards) == [0.0] * size


def test_a_small_but_real_difference_is_a_signal() -> None:
    assert Grpo().advantages([0.5, 0.5001])[1] > 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_unscored_reward_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="reward 1 of the group"):
        Grpo().advantages([1.0, bad])
