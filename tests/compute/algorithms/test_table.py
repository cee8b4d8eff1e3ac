"""Algorithms are picked by name and their knobs are closed."""

from __future__ import annotations

import pytest

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.table import parse_algorithm


def test_a_dumped_algorithm_comes_back_equal() -> None:
    algorithm = Grpo(clip_high=0.3, aggregation="episode-mean")
    assert parse_algorithm(algorithm.model_dump()) == algorithm


def test_an_unknown_algorithm_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"'ppo', known: grpo"):
        parse_algorithm({"name": "ppo"})


def test_a_missing_name_is_refused() -> None:
    with pytest.raises(ValueError, match="known: grpo"):
        parse_algorithm({})


def test_an_unknown_knob_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'clip_high'"):
        parse_algorithm({"name": "grpo", "clip_hihg": 0.3})


def test_a_group_of_one_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="min_group_size"):
        parse_algorithm({"name": "grpo", "min_group_size": 1})
