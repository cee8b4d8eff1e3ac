"""Token losses against hand-computed values and a slow float64 reference, on ragged rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megloom.compute.algorithms.base import Cispo, Clip, Gspo, Sapo
from megloom.compute.trainers.losses import TokenLosses, imitation, kl_penalty, surrogate

from . import slow_losses
from .slow_losses import Ragged

QWENGYRE = Gspo(form="token", token_cap=5)
SURROGATES = (
    Clip(),
    Clip(dual_clip=3),
    Gspo(),
    Gspo(form="token"),
    QWENGYRE,
    Gspo(token_cap=1.5),
    Cispo(),
    Sapo(),
    Sapo(tau_positive=2.0, tau_negative=0.5),
)
NAMES = [repr(knobs) for knobs in SURROGATES]


def flat(rows: Ragged, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def row_numbers(rows: Ragged) -> Tensor:
    return torch.tensor([number for number, row in enumerate(rows) for _ in row])


def losses_of(
    knobs: Any,
    new: Tensor,
    base: Tensor,
    advantages: Tensor,
    rows: Tensor,
    low: float = 0.2,
    high: float = 0.28,
) -> TokenLosses:
    return surrogate(
        knobs, new, base_N=base, advantages_N=advantages, rows_N=rows, clip_low=low, clip_high=high
    )


def gradient(loss: Tensor, of: Tensor) -> list[float]:
    return torch.autograd.grad(loss.sum(), of)[0].tolist()


@st.composite
def ragged(draw: st.DrawFn, count: int) -> list[Ragged]:
    """`count` tables of the same ragged shape, of float32 numbers within ±3."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    number = st.floats(-3, 3, width=32)
    return [[draw(st.lists(number, min_size=n, max_size=n)) for n in lengths] for _ in range(count)]


def test_the_four_corners_of_the_clip_by_hand() -> None:
    ratios, advantages = [1.2, 1.4, 0.5, 1.4], [1.0, 1.0, -1.0, -1.0]
    new = torch.tensor([math.log(r / 2) for r in ratios])
    losses = losses_of(
        Clip(), new, torch.full((4,), math.log(0.5)), torch.tensor(advantages), torch.arange(4)
    )
    assert losses.losses_N.tolist() == pytest.approx([-1.2, -1.28, 0.8, 1.4], abs=1e-6)
    assert losses.is_clipped_N.tolist() == [False, True, True, False]


def test_dual_clip_bounds_only_bad_tokens_that_became_likely() -> None:
    new = torch.tensor([5.0, 2.0, 5.0]).log().requires_grad_()
    losses = losses_of(
        Clip(dual_clip=3), new, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), torch.arange(3)
    )
    assert losses.losses_N.tolist() == pytest.approx([3.0, 2.0, -1.28])
    assert losses.is_clipped_N.tolist() == [True, False, True]
    assert gradient(losses.losses_N, new) == pytest.approx([0.0, 2.0, 0.0])


def test_gspo_by_hand_in_both_forms() -> None:
    new, base = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True), torch.tensor([-1.1, -1.8, -0.5])
    ratio = math.exp((0.1 - 0.2) / 2)
    for form in ("sequence", "token"):
        losses = losses_of(Gspo(form=form), new, base, torch.full((3,), 2.0), torch.tensor([0, 0, 1]))
        assert losses.losses_N.tolist() == pytest.approx([-2 * ratio, -2 * ratio, -2.0])
        assert gradient(losses.losses_N, new) == pytest.approx([-2 * ratio, -2 * ratio, -2.0])


def test_gspo_token_form_keeps_advantages_of_tokens_apart() -> None:
    new, base, rows = torch.zeros(2, requires_grad=True), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    advantages = torch.tensor([3.0, -1.0])
    token = losses_of(Gspo(form="token"), new, base, advantages, rows)
    assert gradient(token.losses_N, new) == pytest.approx([-3.0, 1.0])
    sequence = losses_of(Gspo(), new, base, advantages, rows)
    assert gradient(sequence.losses_N, new) == pytest.approx([-1.0, -1.0])


@pytest.mark.parametrize("form", ["sequence", "token"])
def test_qwengyres_variant_caps_tokens_and_clips_the_sequence_tightly(form: Any) -> None:
    knobs = Gspo(form=form, token_cap=5)

    def result(*log_ratios: float) -> tuple[list[float], list[float]]:
        new = torch.tensor(log_ratios, requires_grad=True)
        count = len(log_ratios)
        losses = losses_of(
            knobs,
            new,
            torch.zeros(count),
            torch.ones(count),
            torch.zeros(count, dtype=torch.int64),
            0.005,
            0.005,
        )
        return losses.losses_N.tolist(), gradient(losses.losses_N, new)

    losses, slopes = result(
        math.log(50), -math.log(5.01)
    )  # the cap turns 50 into 5: the mean is just below 1
    inside = math.sqrt(5 / 5.01)
    assert losses == pytest.approx([-inside, -inside], rel=1e-6)
    assert slopes == pytest.approx([0.0, -inside], rel=1e-6), "a capped token has no gradient"
    losses, slopes = result(0.01, 0.01)
    assert losses == pytest.approx([-1.005, -1.005]) and slopes == [0.0, 0.0]


def test_cispo_keeps_every_tokens_gradient() -> None:
    new = torch.tensor([9.0, 1.0, 0.1]).log().requires_grad_()
    losses = losses_of(
        Cispo(), new, torch.zeros(3), torch.tensor([1.0, 2.0, -1.0]), torch.arange(3), 0.5, 4.0
    )
    assert gradient(losses.losses_N, new) == pytest.approx([-5.0, -2.0, 0.5])
    assert losses.is_clipped_N.tolist() == [True, False, True]


def test_sapo_starts_as_the_plain_ratio_and_fades() -> None:
    new = torch.tensor([0.0, 0.0, math.log(30.0)], requires_grad=True)
    losses = losses_of(Sapo(), new, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), torch.arange(3))
    slopes = gradient(losses.losses_N, new)
    assert slopes[:2] == pytest.approx([-1.0, 1.0])
    assert abs(slopes[2]) < 1e-9


@settings(max_examples=60, deadline=None)
@given(tables=ragged(3), number=st.integers(0, len(SURROGATES) - 1))
def test_every_surrogate_equals_the_slow_reference(tables: list[Ragged], number: int) -> None:
    knobs = SURROGATES[number]
    new, base, advantages = tables
    low, high = (0.005, 0.005) if knobs is QWENGYRE else (0.2, 0.28)
    got = losses_of(knobs, flat(new), flat(base), flat(advantages), row_numbers(new), low, high).losses_N
    expected = flat(slow_losses.surrogate(knobs, new, base, advantages, 1 - low, 1 + high), torch.float64)
    assert ((got.double() - expected).abs() <= 1e-6 * expected.abs().clamp(min=1)).all()


@pytest.mark.parametrize("knobs", [k for k in SURROGATES if not isinstance(k, Cispo)], ids=repr)
def test_gradients_equal_differences_of_the_slow_reference(knobs: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths, step = [3, 1, 4], 1e-6

    def table(scale: float) -> Ragged:
        return [(torch.randn(n, generator=generator, dtype=torch.float64) * scale).tolist() for n in lengths]

    new, base = table(0.3), table(0.3)
    advantages = [[float(row[0])] * len(row) for row in table(1.0)]  # equal within a row, as both forms need
    tensor = flat(new, torch.float64).requires_grad_()
    losses = losses_of(
        knobs, tensor, flat(base, torch.float64), flat(advantages, torch.float64), row_numbers(new)
    )
    got = iter(gradient(losses.losses_N, tensor))
    for row in new:
        for place in range(len(row)):
            sums = []
            for sign in (1, -1):
                row[place] += sign * step
                sums.append(
                    flat(slow_losses.surrogate(knobs, new, base, advantages, 0.8, 1.28), torch.float64).sum()
                )
                row[place] -= sign * step
            assert next(got) == pytest.approx(float(sums[0] - sums[1]) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("knobs", SURROGATES, ids=NAMES)
def test_the_order_of_rows_changes_no_tokens_loss(knobs: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.tensor([0, 0, 0, 1, 2, 2])
    new, base, advantages = (torch.randn(6, generator=generator) for _ in range(3))
    order = torch.tensor([4, 5, 3, 0, 1, 2])
    renamed = torch.tensor([0, 0, 1, 2, 2, 2])
    one = losses_of(knobs, new, base, advantages, rows)
    other = losses_of(knobs, new[order], base[order], advantages[order], renamed)
    assert torch.equal(one.losses_N[order], other.losses_N)


@pytest.mark.parametrize("knobs", SURROGATES, ids=NAMES)
@pytest.mark.parametrize("gap", [-300.0, 300.0])
def test_an_extreme_ratio_keeps_loss_and_gradient_finite(knobs: Any, gap: float) -> None:
    new = torch.tensor([gap], requires_grad=True)
    losses = losses_of(knobs, new, torch.zeros(1), -torch.ones(1), torch.zeros(1, dtype=torch.int64)).losses_N
    assert torch.isfinite(losses).all() and math.isfinite(gradient(losses, new)[0])


@pytest.mark.parametrize("knobs", SURROGATES, ids=NAMES)
def test_a_nan_is_never_swallowed_by_a_clip(knobs: Any) -> None:
    new, base = torch.zeros(2), torch.tensor([0.0, math.nan])
    for advantage in (1.0, -1.0):
        losses = losses_of(knobs, new, base, torch.full((2,), advantage), torch.tensor([0, 1])).losses_N
        assert losses.isfinite().tolist() == [True, False]


@settings(max_examples=30, deadline=None)
@given(tables=ragged(2), estimator=st.sampled_from(["k1", "k2", "k3"]))
def test_kl_equals_the_slow_reference(tables: list[Ragged], estimator: Any) -> None:
    got = kl_penalty(flat(tables[0]), reference_N=flat(tables[1]), estimator=estimator)
    expected = flat(slow_losses.kl(estimator, *tables), torch.float64)
    assert ((got.double() - expected).abs() <= 1e-6 * expected.abs().clamp(min=1)).all()


def test_kl_gradients_pull_towards_the_reference() -> None:
    new = torch.tensor([-1.0, -3.0], requires_grad=True)
    reference = torch.tensor([-2.0, -1.0])
    slopes = {
        name: gradient(kl_penalty(new, reference_N=reference, estimator=name), new)
        for name in ("k1", "k2", "k3")
    }
    assert slopes["k1"] == slopes["k2"] == pytest.approx([1.0, -2.0])
    assert slopes["k3"] == pytest.approx([1 - math.exp(-1.0), 1 - math.exp(2.0)])


def test_the_kl_to_itself_is_zero_in_value_and_gradient() -> None:
    for estimator in ("k1", "k2", "k3"):
        new = torch.tensor([-1.0, -30.0], requires_grad=True)
        penalty = kl_penalty(new, reference_N=new.detach(), estimator=estimator)
        assert penalty.tolist() == [0.0, 0.0] and gradient(penalty, new) == [0.0, 0.0]


def test_imitation_is_the_negative_logprob() -> None:
    losses = imitation(torch.tensor([-0.5, -2.0]))
    assert losses.losses_N.tolist() == [0.5, 2.0] and not losses.is_clipped_N.any()
