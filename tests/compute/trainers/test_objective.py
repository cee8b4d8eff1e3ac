"""A pass's loss put together: against the slow reference, term by term, and blind to masked slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megloom.compute.algorithms.base import Cispo, Clip, Correction, Gspo, Kl, PolicyGradient, Sapo
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.trainers.heads import Readout
from megloom.compute.trainers.objective import (
    Objective,
    imitation_objective,
    needed_columns,
    policy_objective,
)
from megloom.compute.trainers.passes import collate
from megloom.compute.trainers.protocol import COLUMNS, TrainingRow

from . import slow_losses
from .builders import ragged_rows
from .slow_losses import Ragged

CPU = torch.device("cpu")
ALGORITHMS: list[PolicyGradient] = [
    Grpo(),
    Grpo(surrogate=Gspo(), kl=Kl(coefficient=0.3, estimator="k2"), entropy=0.02),
    Grpo(surrogate=Cispo(), correction=Correction(name="icepop", low=0.6, high=1.7)),
    Grpo(surrogate=Sapo(), kl=Kl(coefficient=0.3, estimator="k1"), correction=Correction(name="decoupled")),
    Ppo(surrogate=Clip(dual_clip=3), correction=Correction(name="token-tis", high=1.2), entropy=0.1),
    Ppo(value_clip=None, value_coefficient=2.0, kl=Kl(coefficient=0.3)),
]


def rows_with_columns() -> list[TrainingRow]:
    rng = np.random.default_rng(1)
    rows = []
    for number, one in enumerate(ragged_rows(5)):
        columns = {name: rng.normal(0, 0.7, len(one.token_ids)).astype(np.float32) for name in COLUMNS}
        columns["proximal_logprobs"] = one.logprobs + columns["proximal_logprobs"]
        rows.append(replace(one, columns=columns, weight=0.1 + number))
    return rows


ROWS = rows_with_columns()
LENGTHS = [int(one.loss_mask.sum()) for one in ROWS]


def readout() -> Readout:
    generator = torch.Generator().manual_seed(2)
    near = torch.cat([torch.from_numpy(one.logprobs[one.loss_mask == 1]) for one in ROWS])
    noise, values, entropies = (torch.randn(len(near), generator=generator) * 0.5 for _ in range(3))
    return Readout(logprobs_N=near + noise, entropies_N=entropies.abs(), values_N=values)


def asked(algorithm: PolicyGradient) -> Readout:
    """What the replica would read out for the algorithm."""
    everything = readout()
    return replace(
        everything,
        entropies_N=everything.entropies_N if algorithm.entropy else None,
        values_N=everything.values_N if algorithm.has_critic else None,
    )


def as_rows(values_N: torch.Tensor) -> Ragged:
    return [piece.tolist() for piece in values_N.double().split(LENGTHS)]


def column(name: str) -> Ragged:
    return [one.columns[name][one.loss_mask == 1].astype(float).tolist() for one in ROWS]


def expected_loss(algorithm: PolicyGradient) -> float:
    read = asked(algorithm)
    behaviour = [one.logprobs[one.loss_mask == 1].astype(float).tolist() for one in ROWS]
    correction = algorithm.correction or Correction(name="behaviour")
    base = behaviour if correction.name == "behaviour" else column("proximal_logprobs")
    new, advantages = as_rows(read.logprobs_N), column("advantages")
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    total = slow_losses.mapped(
        lambda loss, weight: loss * weight,
        slow_losses.surrogate(algorithm.surrogate, new, base, advantages, low, high),
        slow_losses.correction_weights(correction, column("proximal_logprobs"), behaviour),
    )

    def plus(coefficient: float, terms: Ragged) -> Ragged:
        return slow_losses.mapped(lambda loss, term: loss + coefficient * term, total, terms)

    if algorithm.kl is not None:
        kl = slow_losses.kl(algorithm.kl.estimator, new, column("reference_logprobs"))
        total = plus(algorithm.kl.coefficient, kl)
    if read.entropies_N is not None:
        total = plus(-algorithm.entropy, as_rows(read.entropies_N))
    if read.values_N is not None:
        assert isinstance(algorithm, Ppo)
        value = slow_losses.value_loss(
            as_rows(read.values_N), column("returns"), column("values"), algorithm.value_clip
        )
        total = plus(algorithm.value_coefficient, value)
    return sum(one.weight * sum(losses) for one, losses in zip(ROWS, total, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=range(len(ALGORITHMS)))
def test_an_objective_equals_the_slow_reference(algorithm: PolicyGradient) -> None:
    objective = policy_objective(algorithm, asked(algorithm), collate(ROWS, CPU))
    assert objective.losses_N.double().sum().item() == pytest.approx(expected_loss(algorithm), rel=1e-6)


def test_metrics_are_named_for_the_report() -> None:
    objective = policy_objective(ALGORITHMS[4], asked(ALGORITHMS[4]), collate(ROWS, CPU))
    assert objective.metrics_N.keys() == {"correction", "entropy", "value_loss"}
    popped = policy_objective(ALGORITHMS[2], asked(ALGORITHMS[2]), collate(ROWS, CPU))
    assert popped.metrics_N.keys() == {"correction", "num_rejected"}
    assert 0 < int(popped.metrics_N["num_rejected"].sum()) < sum(LENGTHS)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=range(len(ALGORITHMS)))
def test_what_stands_in_masked_slots_changes_nothing(algorithm: PolicyGradient) -> None:
    def poisoned(one: TrainingRow) -> TrainingRow:
        def spoil(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
            return np.where(one.loss_mask, values, np.float32(np.nan)).astype(np.float32)

        columns = {name: spoil(values) for name, values in one.columns.items()}
        return replace(one, logprobs=spoil(one.logprobs), columns=columns)

    def result(rows: list[TrainingRow]) -> Objective:
        return policy_objective(algorithm, asked(algorithm), collate(rows, CPU))

    clean, dirty = result(ROWS), result([poisoned(one) for one in ROWS])
    assert torch.equal(clean.losses_N, dirty.losses_N) and clean.losses_N.isfinite().all()
    assert torch.equal(clean.is_clipped_N, dirty.is_clipped_N)


def test_a_rejected_token_keeps_its_kl_term() -> None:
    algorithm = Grpo(kl=Kl(coefficient=1.0), correction=Correction(name="icepop", low=100.0, high=200.0))
    objective = policy_objective(algorithm, asked(algorithm), collate(ROWS, CPU))
    weights_N = torch.cat([torch.full((n,), one.weight) for n, one in zip(LENGTHS, ROWS, strict=True)])
    assert torch.allclose(objective.losses_N, weights_N * objective.metrics_N["kl"])


def test_without_proximal_logprobs_the_pass_itself_is_proximal() -> None:
    algorithm = Grpo(correction=Correction(name="decoupled"))
    bare = [replace(one, columns={}) for one in ROWS]
    read = replace(asked(algorithm), logprobs_N=readout().logprobs_N.requires_grad_())
    objective = policy_objective(algorithm, read, collate(bare, CPU))
    assert not objective.is_clipped_N.any()
    (slopes_N,) = torch.autograd.grad(objective.losses_N.sum(), read.logprobs_N)
    plain = torch.cat([torch.full((int(one.loss_mask.sum()),), one.weight * one.advantage) for one in bare])
    weights_N = objective.metrics_N["correction"]
    assert torch.allclose(slopes_N, -plain * weights_N, rtol=1e-5)


def test_needed_columns_follow_the_algorithm() -> None:
    assert needed_columns(Grpo(correction=Correction(name="token-tis"))) == ()
    assert needed_columns(Ppo(kl=Kl(coefficient=0.1))) == (
        "reference_logprobs",
        "advantages",
        "returns",
        "values",
    )


def test_imitation_weighs_the_negative_logprobs() -> None:
    objective = imitation_objective(readout(), collate(ROWS, CPU))
    logprobs = as_rows(readout().logprobs_N)
    expected = sum(-one.weight * sum(piece) for one, piece in zip(ROWS, logprobs, strict=True))
    assert objective.losses_N.double().sum().item() == pytest.approx(expected, rel=1e-6)
