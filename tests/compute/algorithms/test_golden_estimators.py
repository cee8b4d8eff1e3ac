"""Advantages against the numbers of published trainers (1e-5: they are rounded), a slow reference (1e-6)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megloom.compute.algorithms.base import Outcome
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.algorithms.statistics import whitened
from megloom.compute.algorithms.table import parse_algorithm

GOLDEN = json.loads((Path(__file__).parent / "golden_estimators.json").read_text())
LENGTHS = [sum(row) for row in GOLDEN["mask"]]
DR_GRPO = {"name": "grpo", "normalise": "none"}
BASELINE = {"name": "reinforce_pp", "baseline": "group"}


def members(rewards: list[float], groups: list[str], lengths: list[int]) -> list[Outcome]:
    return [
        Outcome(
            key=str(i), episode_id=str(i), group_id=group, agent="solver", reward=reward, num_tokens=length
        )
        for i, (reward, group, length) in enumerate(zip(rewards, groups, lengths, strict=True))
    ]


def ours(knobs: dict[str, Any], rewards: list[float], groups: list[str], lengths: list[int]) -> list[float]:
    return parse_algorithm(knobs).estimate(members(rewards, groups, lengths), {})


@pytest.mark.parametrize(
    ("knobs", "published"),
    [
        ({"name": "grpo"}, "grpo"),
        ({"name": "grpo"}, "skyrl_grpo"),
        ({"name": "grpo"}, "roll_reward_norm_group"),
        ({"name": "dapo"}, "grpo"),
        ({"name": "dr_mas"}, "grpo"),
        (DR_GRPO, "drgrpo"),
        ({"name": "rloo"}, "rloo"),
        ({"name": "rloo"}, "skyrl_rloo"),
        (BASELINE, "reinforce_pp_baseline"),
        ({"name": "hierarchical_grpo"}, "grpo"),
    ],
)
def test_advantages_equal_published_ones(knobs: dict[str, Any], published: str) -> None:
    found = ours(knobs, GOLDEN["rewards"], GOLDEN["groups"], LENGTHS)
    assert found == pytest.approx(GOLDEN[published], abs=1e-5)


def test_reinforce_pp_equals_verl_token_for_token() -> None:
    found = ours({"name": "reinforce_pp"}, GOLDEN["rewards"], GOLDEN["groups"], LENGTHS)
    assert [found[0]] * 5 == pytest.approx(GOLDEN["reinforce_pp_row_0"], abs=1e-5)
    total = sum(advantage * length for advantage, length in zip(found, LENGTHS, strict=True))
    assert total == pytest.approx(GOLDEN["reinforce_pp_sum"], abs=1e-5)


def test_skyrls_reinforce_pp_differs_by_the_return_that_a_masked_token_cuts() -> None:
    """Row 2 has a masked token in its middle: there the two tokens before it are an outcome of reward 0."""
    rewards, groups = list(GOLDEN["rewards"]), list(GOLDEN["groups"])
    lengths = [*LENGTHS, 2]
    lengths[2] = 2
    found = ours({"name": "reinforce_pp"}, [*rewards, 0.0], [*groups, "a"], lengths)
    assert [found[0]] * 5 == pytest.approx(GOLDEN["skyrl_reinforce_pp_row_0"], abs=1e-5)


def test_gae_equals_verl_once_its_advantages_are_whitened_over_the_tokens() -> None:
    algorithm = Ppo(gamma=1.0, lam=0.95)
    tokens = [
        advantage
        for reward, length in zip(GOLDEN["rewards"], LENGTHS, strict=True)
        for advantage in algorithm.columns(reward, [0.0] * length)["advantages"]
    ]
    assert whitened(tokens, [1.0] * len(tokens))[:5] == pytest.approx(GOLDEN["gae_row_0"], abs=1e-5)


def slow(knobs: dict[str, Any], rewards: np.ndarray, groups: list[str], lengths: list[int]) -> np.ndarray:
    """The same formulas over padded [B, T] arrays in float64, loop by loop, without a shared line."""
    num_rows = len(rewards)
    result = np.zeros(num_rows, dtype=np.float64)
    per_group = {name: [i for i in range(num_rows) if groups[i] == name] for name in groups}
    for i in range(num_rows):
        mine = rewards[per_group[groups[i]]]
        if knobs["name"] == "grpo":
            result[i] = rewards[i] - mine.mean()
            if knobs.get("normalise", "std") == "std":
                result[i] /= mine.std(ddof=1) + 1e-6
        elif knobs["name"] == "rloo":
            others = [rewards[j] for j in per_group[groups[i]] if j != i]
            result[i] = rewards[i] - np.mean(others)
        else:
            result[i] = rewards[i] - (mine.mean() if knobs.get("baseline") == "group" else 0.0)
    if knobs["name"] == "reinforce_pp":
        width = max(lengths)
        mask = np.array([[t < length for t in range(width)] for length in lengths])
        tokens = np.where(mask, result[:, None], 0.0)[mask]
        result = (result - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    return result


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "knobs",
    [{"name": "grpo"}, DR_GRPO, {"name": "rloo"}, {"name": "reinforce_pp"}, BASELINE],
    ids=lambda knobs: "-".join(map(str, knobs.values())),
)
def test_advantages_equal_a_slow_reference_on_ragged_groups(knobs: dict[str, Any], seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(2, 9, size=5)
    groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
    rewards = random.normal(size=len(groups)).astype(np.float64) * 3 + 1
    lengths = [int(length) for length in random.integers(1, 30, size=len(groups))]
    order = random.permutation(len(groups))
    shuffled = [groups[i] for i in order]
    found = ours(knobs, [float(rewards[i]) for i in order], shuffled, [lengths[i] for i in order])
    expected = slow(knobs, rewards[order], shuffled, [lengths[i] for i in order])
    assert np.allclose(found, expected, rtol=0, atol=1e-6)


def episodes(seed: int) -> list[Outcome]:
    """Two agents in ragged groups: calls scored for themselves, in rounds, and episodes that share."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(5):
        for member in range(int(random.integers(2, 8))):
            for agent in ("solver", "critic"):
                episode = f"g{number}-m{member}"
                num_turns = int(random.integers(0, 4))
                for turn in range(max(1, num_turns)):
                    limit = int(random.integers(20, 60))
                    found.append(
                        Outcome(
                            key=f"{episode}-{agent}-{turn}" if num_turns else episode,
                            episode_id=episode,
                            group_id=f"g{number}",
                            agent=agent,
                            reward=float(random.normal() * 3 + 1) if number else 0.7,  # one constant group
                            round=turn,
                            num_tokens=int(random.integers(1, limit + 1)),
                            limit_tokens=limit,
                            num_calls=int(random.integers(1, 6)),
                        )
                    )
    return [found[i] for i in random.permutation(len(found))]


def over_deviation(value: float, others: list[float]) -> float:
    """(value − mean) / (std + 1e-6), 0 for a value alone or equal ones."""
    if len(others) < 2 or max(others) - min(others) == 0.0:
        return 0.0
    array = np.array(others, dtype=np.float64)
    return float((value - array.mean()) / (array.std(ddof=1) + 1e-6))


def after_penalty(one: Outcome) -> float:
    """DAPO's: 0 up to 8 tokens below the limit, then falling to −2 at the limit."""
    start = one.limit_tokens - 8
    return one.reward - (2.0 * (one.num_tokens - start) / 8 if one.num_tokens > start else 0.0)


def slow_dapo(one: Outcome, outcomes: list[Outcome]) -> float:
    peers = [o for o in outcomes if (o.group_id, o.agent) == (one.group_id, one.agent)]
    if len({o.reward for o in peers}) == 1:
        return 0.0
    return over_deviation(after_penalty(one), [after_penalty(o) for o in peers])


def slow_dr_mas(one: Outcome, outcomes: list[Outcome]) -> float:
    """Each outcome written down once for every call; one outcome alone has no baseline."""
    peers = [o for o in outcomes if (o.group_id, o.agent) == (one.group_id, one.agent)]
    copies = [o.reward for o in peers for _ in range(o.num_calls)]
    return over_deviation(one.reward, copies) if len(peers) > 1 else 0.0


STATE = {"solver": 0.4, "critic": -1.5}


def slow_rae(one: Outcome, outcomes: list[Outcome]) -> float:
    return one.reward - STATE[one.agent]


def slow_hierarchical(one: Outcome, outcomes: list[Outcome]) -> float:
    mine = [o for o in outcomes if (o.group_id, o.agent) == (one.group_id, one.agent)]
    if len(mine) < 2:
        return 0.0
    returns = {}
    for episode in sorted({o.episode_id for o in mine}):
        returns[episode] = float(np.mean([o.reward for o in mine if o.episode_id == episode]))
    result = over_deviation(returns[one.episode_id], list(returns.values()))
    if one.key != one.episode_id:
        in_round = [o.reward for o in mine if o.round == one.round and o.key != o.episode_id]
        result += 0.5 * over_deviation(one.reward, in_round)
    return result


SLOW: list[tuple[dict[str, Any], Callable[[Outcome, list[Outcome]], float]]] = [
    ({"name": "dapo", "overlong": {"buffer_tokens": 8, "penalty": 2.0}}, slow_dapo),
    ({"name": "dr_mas", "weigh": "calls"}, slow_dr_mas),
    ({"name": "rae"}, slow_rae),
    ({"name": "hierarchical_grpo", "round_weight": 0.5}, slow_hierarchical),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("knobs", "reference"), SLOW, ids=lambda value: getattr(value, "__name__", ""))
def test_advantages_equal_a_slow_reference_on_ragged_episodes(
    knobs: dict[str, Any], reference: Callable[[Outcome, list[Outcome]], float], seed: int
) -> None:
    outcomes = episodes(seed)
    found = parse_algorithm(knobs).estimate(outcomes, STATE)
    expected = [reference(one, outcomes) for one in outcomes]
    assert sum(value != 0.0 for value in expected) > len(expected) / 2
    assert np.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_running_baseline_is_that_of_a_loop_over_the_mean(seed: int) -> None:
    outcomes, decay = episodes(seed), 0.9
    expected = dict(STATE)
    for agent in STATE:
        rewards = [o.reward for o in outcomes if o.agent == agent]
        for _ in rewards:
            expected[agent] = decay * expected[agent] + (1 - decay) * float(np.mean(rewards))
    found = parse_algorithm({"name": "rae", "decay": decay}).next_state(outcomes, STATE)
    assert found == pytest.approx(expected, rel=0, abs=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
def test_gae_equals_the_sum_of_discounted_residuals(gamma: float, lam: float) -> None:
    """A_t = Σ_k (γλ)^k δ_{t+k}, written out."""
    random = np.random.default_rng(7)
    values = random.normal(size=11)
    deltas = [
        (1.7 if t == 10 else 0.0) + gamma * (values[t + 1] if t < 10 else 0.0) - values[t] for t in range(11)
    ]
    expected = [sum((gamma * lam) ** k * deltas[t + k] for k in range(11 - t)) for t in range(11)]
    found = Ppo(gamma=gamma, lam=lam).columns(1.7, values.tolist())
    assert found["advantages"] == pytest.approx(expected, abs=1e-12)
    assert found["returns"] == pytest.approx(
        [a + v for a, v in zip(expected, values, strict=True)], abs=1e-12
    )
