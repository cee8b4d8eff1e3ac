"""Weights of samples that other weights made: against the slow reference, by hand, and at their edges."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.algorithms.base import Correction
from megloom.compute.trainers.corrections import correct

from . import slow_losses
from .slow_losses import Ragged
from .test_losses import flat, ragged, row_numbers

NAMES = get_args(Correction.model_fields["name"].annotation)


def corrected(correction: Correction | None, proximal: Ragged, behaviour: Ragged) -> Any:
    return correct(
        correction,
        behaviour_N=flat(behaviour, torch.float64),
        proximal_N=flat(proximal, torch.float64),
        rows_N=row_numbers(behaviour),
    )


@settings(max_examples=60, deadline=None)
@given(tables=ragged(2), name=st.sampled_from(NAMES))
def test_weights_equal_the_slow_reference(tables: list[Ragged], name: Any) -> None:
    correction = Correction(name=name, low=0.47, high=2.13)
    proximal, behaviour = tables
    result = corrected(correction, proximal, behaviour)
    expected = flat(slow_losses.correction_weights(correction, proximal, behaviour), torch.float64)
    got = torch.ones_like(expected) if result.weights_N is None else result.weights_N
    assert ((got - expected).abs() <= 1e-6 * expected.abs().clamp(min=1)).all()
    base = flat(behaviour if name == "behaviour" else proximal, torch.float64)
    assert torch.equal(result.base_N, base)
    if result.is_rejected_N is not None:
        assert torch.equal(result.is_rejected_N, expected == 0)


@pytest.mark.parametrize("correction", [None, Correction(name="behaviour")])
def test_without_a_split_the_ratio_is_against_the_behaviour(correction: Correction | None) -> None:
    result = corrected(correction, [[0.0]], [[-1.0]])
    assert result.base_N.tolist() == [-1.0] and result.weights_N is None and result.is_rejected_N is None


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_the_same_weights_are_left_alone(name: Any) -> None:
    result = corrected(Correction(name=name), [[-1.0, -2.0]], [[-1.0, -2.0]])
    assert result.weights_N is None or result.weights_N.tolist() == [1.0, 1.0]


def test_bounds_are_inclusive() -> None:
    tables = [[math.log(0.5)], [math.log(2.0)], [math.log(2.0) + 1e-9]], [[0.0], [0.0], [0.0]]
    for name in ("icepop", "sequence-mask"):
        result = corrected(Correction(name=name), *tables)
        assert result.weights_N.tolist() == pytest.approx([0.5, 2.0, 0.0])
        assert result.is_rejected_N.tolist() == [False, False, True]


@pytest.mark.parametrize("name", ["token-tis", "sequence-tis", "icepop", "sequence-mask", "decoupled"])
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_an_extreme_gap_gives_a_finite_weight(name: Any, gap: float) -> None:
    assert corrected(Correction(name=name), [[gap, gap]], [[0.0, 0.0]]).weights_N.isfinite().all()


@pytest.mark.parametrize("name", ["token-tis", "sequence-tis", "icepop", "sequence-mask", "decoupled"])
def test_a_nan_is_not_taken_for_a_rejection(name: Any) -> None:
    result = corrected(Correction(name=name), [[0.0, 0.0], [0.0]], [[0.0, math.nan], [0.0]])
    assert result.weights_N[1].isnan() and result.weights_N[2] == 1.0
