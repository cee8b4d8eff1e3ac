"""Algorithms are picked by name and their knobs are closed."""

from __future__ import annotations

import json

import pytest

from megloom.compute.algorithms.base import Correction, Gspo, Kl, Overlong
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.table import ALGORITHMS, parse_algorithm, policy_algorithm
from megloom.compute.workload import Optimizer, Policy, PretrainedModel


def test_a_dumped_algorithm_comes_back_equal() -> None:
    algorithm = Grpo(clip_high=0.3, aggregation="episode-mean")
    assert parse_algorithm(algorithm.model_dump()) == algorithm


def test_an_unknown_algorithm_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"'q_learning', known: dapo, dr_mas, grpo, .*rloo"):
        parse_algorithm({"name": "q_learning"})


def test_a_missing_name_is_refused() -> None:
    with pytest.raises(ValueError, match="got None, known: dapo"):
        parse_algorithm({})


def test_an_unknown_knob_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'clip_high'"):
        parse_algorithm({"name": "grpo", "clip_hihg": 0.3})


def test_a_group_of_one_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="min_group_size"):
        parse_algorithm({"name": "grpo", "min_group_size": 1})


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_comes_back_from_plain_data_with_all_its_parts(name: str) -> None:
    algorithm = ALGORITHMS[name].parse(
        {
            "surrogate": Gspo(form="token", token_cap=5.0),
            "kl": Kl(coefficient=0.1),
            "correction": Correction(name="icepop"),
            "overlong": Overlong(buffer_tokens=16),
            "aggregation": "seq-mean-token-sum-norm",
            "norm_tokens": 64,
        }
    )
    again = parse_algorithm(json.loads(json.dumps(algorithm.model_dump())))
    assert (again, type(again)) == (algorithm, ALGORITHMS[name]) and again.name == name


def test_a_critic_takes_no_group_size() -> None:
    with pytest.raises(ValueError, match="min_group_size"):
        parse_algorithm({"name": "ppo", "min_group_size": 2})


LAG = "max_off_policy_steps 2 without a correction"


def test_lag_without_a_correction_is_refused_where_the_policy_is_written_and_where_its_plan_is_read() -> None:
    knobs = {"model": PretrainedModel(path="m"), "optimizer": Optimizer(learning_rate=1e-3)}
    with pytest.raises(ValueError, match=LAG):
        Policy(algorithm=Grpo(), max_off_policy_steps=2, **knobs)
    unchecked = Policy(algorithm=Grpo(), **knobs).model_copy(update={"max_off_policy_steps": 2})
    with pytest.raises(ValueError, match=f"policy solver: {LAG}: set the algorithm's `correction`"):
        policy_algorithm("solver", unchecked.model_dump())


def test_lag_with_a_correction_is_allowed() -> None:
    algorithm = Grpo(correction=Correction(name="token-tis"))
    policy = Policy(
        model=PretrainedModel(path="m"),
        optimizer=Optimizer(learning_rate=1e-3),
        algorithm=algorithm,
        max_off_policy_steps=2,
    )
    assert policy_algorithm("solver", policy.model_dump()) == algorithm


def test_a_wrong_knob_in_a_plan_names_its_policy() -> None:
    with pytest.raises(ValueError, match="policy solver: unknown key 'clip'"):
        policy_algorithm("solver", {"algorithm": {"name": "rloo", "clip": 0.2}})
