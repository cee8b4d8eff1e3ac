"""Whole objectives equal what five published trainers compute on the same numbers (given to 6 digits)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megloom.compute.algorithms.base import Cispo, Clip, Correction, Gspo
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.trainers.corrections import correct
from megloom.compute.trainers.heads import Readout
from megloom.compute.trainers.losses import kl_penalty
from megloom.compute.trainers.objective import policy_objective
from megloom.compute.trainers.passes import Pass, collate

from .builders import row

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_losses.json").read_text())
OUTPUTS: dict[str, Any] = GOLDEN["outputs"]
INPUTS = {name: np.array(values, np.float32) for name, values in GOLDEN["inputs"].items()}
MASK = INPUTS["mask"].astype(bool)
NUM_ROWS, NUM_SLOTS = MASK.shape
COUNTS = MASK.sum(1)

# The weight of each row in the sum: its share of the mean.
WEIGHTS = {
    "token-mean": np.full(NUM_ROWS, 1 / COUNTS.sum()),
    "seq-mean-token-sum": np.full(NUM_ROWS, 1 / NUM_ROWS),
    "seq-mean-token-mean": 1 / COUNTS / NUM_ROWS,
    "seq-mean-token-sum-norm": np.full(NUM_ROWS, 1 / NUM_SLOTS / NUM_ROWS),
    # Rows 0+1 and 3+4 are one episode each. The published mean divides by the number of rows, ours by that
    # of episodes: the factor stands in the scale of the step.
    "episode-mean": 1 / np.array([8, 8, 4, 5, 5, 5]) / NUM_ROWS,
}


DUAL_CLIP = Clip(dual_clip=3)


@dataclass(frozen=True, kw_only=True)
class Case:
    surrogate: Clip | Gspo | Cispo = DUAL_CLIP
    aggregation: str = "token-mean"
    clip: tuple[float, float] = (0.2, 0.28)
    correction: Correction | None = None


PPO, SEQUENCES = Case(), "seq-mean-token-mean"
TIS = Case(correction=Correction(name="token-tis", high=2.0))
ICEPOP = Case(correction=Correction(name="icepop", low=0.5, high=1.2))
CISPO = Case(surrogate=Cispo(), clip=(1.0, 4.0))
GSPO = Case(surrogate=Gspo(), aggregation=SEQUENCES)
PPO_BY_SEQUENCE = Case(aggregation=SEQUENCES)
LOSSES = {
    "verl.ppo vanilla(0.2,0.28,c=3) token-mean": PPO,
    "verl.ppo vanilla(0.2,0.28,c=3) seq-mean-token-sum": Case(aggregation="seq-mean-token-sum"),
    "verl.ppo vanilla(0.2,0.28,c=3) seq-mean-token-mean": PPO_BY_SEQUENCE,
    "verl.ppo vanilla(0.2,0.28,c=3) seq-mean-token-sum-norm": Case(aggregation="seq-mean-token-sum-norm"),
    "verl.gspo (0.2,0.28)": GSPO,
    "verl.cispo (low 1.0, high 4.0) token-mean": CISPO,
    "verl.ppo + TIS(2.0) token-mean": TIS,
    "agl.per_rollout_mean loss": Case(aggregation="episode-mean"),
    "openrlhf.ppo token-mean": PPO,
    "openrlhf.ppo seq-mean": PPO_BY_SEQUENCE,
    "openrlhf.gspo": Case(surrogate=Gspo(form="token"), aggregation=SEQUENCES),
    "openrlhf.ppo+icepop [0.5,1.2]": ICEPOP,
    "openrlhf.ppo+seq-mask-tis [0.5,1.2]": Case(
        correction=Correction(name="sequence-mask", low=0.5, high=1.2)
    ),
    "openrlhf.ppo+TIS2": TIS,
    "marti.ppo token-mean": PPO,
    "marti.ppo seq-mean": PPO_BY_SEQUENCE,
    "marti.gspo": GSPO,
    "marti.ppo+TIS2": TIS,
    "slime.ppo token-mean": PPO,
    "slime.ppo sample-mean": PPO_BY_SEQUENCE,
    "slime.gspo sample-mean": GSPO,
    "slime.cispo token-mean": CISPO,
    "areal.ppo token-mean (c_clip=3)": PPO,
    "areal.gspo token-mean-agg": Case(surrogate=Gspo()),
    "areal.cispo": CISPO,
    "areal.decoupled clamp2": TIS,
    "areal.decoupled mask upper=1.2": Case(correction=Correction(name="icepop", low=0.0, high=1.2)),
    "skyrl.ppo token_mean": PPO,
    "skyrl.ppo sequence_mean": PPO_BY_SEQUENCE,
    "skyrl.gspo sequence_mean": GSPO,
    "skyrl.cispo token_mean": CISPO,
    "skyrl.ppo+TIS2 token_mean": TIS,
    "roll.agg token-mean(pg masked by adv)": PPO,
}
GRADIENTS = {
    "verl.ppo grad[0]": PPO,
    "verl.gspo grad[0]": GSPO,
    "openrlhf.gspo grad[0]": Case(surrogate=Gspo(form="token"), aggregation=SEQUENCES),
    "marti.gspo grad[0]": GSPO,
    "areal.gspo grad[0]": Case(surrogate=Gspo(form="token")),
}
TABLES = {
    "verl.rollout_is_weights.token_tis_2": Correction(name="token-tis", high=2.0),
    "verl.rollout_is_weights.sequence_tis_2": Correction(name="sequence-tis", high=2.0),
    "verl.rollout_is_weights.token_icepop_0.8_1.25": Correction(name="icepop", low=0.8, high=1.25),
}
PENALTIES = {"verl.kl_penalty kl": "k1", "verl.kl_penalty k2": "k2", "verl.kl_penalty k3": "k3"}
NOT_OURS = {
    "prime.default DPPO+KL": "another surrogate: masks tokens by probability differences",
    "verl.rollout_is_weights.token_tis_2_batchnorm": "divided by the batch's mean: depends on the cut",
    "roll.agg token-mean of ones, mask 22/30 -> 1?": "a mean whose sum runs over masked slots, a defect",
}


def golden_pass(case: Case) -> Pass:
    """The golden rows, with a prompt of one token in front. Old logprobs are the behaviour's, or with a
    correction the proximal policy's."""
    rows = []
    for number in range(NUM_ROWS):

        def padded(name: str, number: int = number) -> Any:
            return np.concatenate([np.zeros(1), INPUTS[name][number]]).astype(np.float32)

        rows.append(
            row(
                number,
                token_ids=np.arange(NUM_SLOTS + 1, dtype=np.int32),
                loss_mask=np.concatenate([[False], MASK[number]]).astype(np.uint8),
                logprobs=padded("rollout_logp" if case.correction else "old_logp"),
                advantage=float(INPUTS["advantage"][number]),
                weight=float(WEIGHTS[case.aggregation][number]),
                columns={"proximal_logprobs": padded("old_logp")} if case.correction else {},
            )
        )
    return collate(rows, torch.device("cpu"))


def objective(case: Case, logprobs_N: Tensor) -> Tensor:
    knobs = Grpo(
        surrogate=case.surrogate, clip_low=case.clip[0], clip_high=case.clip[1], correction=case.correction
    )
    readout = Readout(logprobs_N=logprobs_N, entropies_N=None, values_N=None)
    return policy_objective(knobs, readout, golden_pass(case)).losses_N.sum()


def selected(name: str) -> Tensor:
    return torch.from_numpy(INPUTS[name][MASK])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_published_trainers(name: str) -> None:
    assert objective(LOSSES[name], selected("new_logp")).item() == pytest.approx(OUTPUTS[name], abs=1e-5)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal_published_trainers(name: str) -> None:
    logprobs_N = selected("new_logp").requires_grad_()
    objective(GRADIENTS[name], logprobs_N).backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad[: COUNTS[0]].tolist() == pytest.approx(OUTPUTS[name], abs=1e-5)


@pytest.mark.parametrize("name", TABLES)
def test_correction_weights_equal_published_tables(name: str) -> None:
    rows_N = torch.from_numpy(np.repeat(np.arange(NUM_ROWS), COUNTS))
    weights_N = correct(
        TABLES[name], behaviour_N=selected("rollout_logp"), proximal_N=selected("old_logp"), rows_N=rows_N
    ).weights_N
    assert weights_N is not None
    assert weights_N.tolist() == pytest.approx(np.array(OUTPUTS[name])[MASK].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", PENALTIES)
def test_kl_penalties_equal_published_ones(name: str) -> None:
    estimator: Any = PENALTIES[name]
    penalty_N = kl_penalty(selected("new_logp"), reference_N=selected("old_logp"), estimator=estimator)
    assert penalty_N.mean().item() == pytest.approx(OUTPUTS[name], abs=1e-5)


def test_every_golden_number_is_compared_or_says_why_not() -> None:
    compared = [LOSSES, GRADIENTS, TABLES, PENALTIES, NOT_OURS]
    assert sorted(name for names in compared for name in names) == sorted(OUTPUTS)
