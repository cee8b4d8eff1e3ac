"""From calls to a real trainer's gradient: what groups are drawn into is what a replica takes.

The reference computes each loss as verl defines it, over padded [B, T] tensors, with plain autograd.
Shapes: B = rows that carry loss, T = tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megloom.compute.algorithms.base import Overlong, PolicyGradient
from megloom.compute.algorithms.dr_mas import DrMas
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.hierarchical_grpo import HierarchicalGrpo
from megloom.compute.conductor.draws import draw_group
from megloom.compute.conductor.estimates import StepEstimates
from megloom.compute.conductor.samples import Aggregation, Sample
from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.training_view import Candidate
from megloom.compute.trainers.model import load_model
from megloom.compute.trainers.protocol import TrainingRow
from tests.compute.trainers.builders import VOCAB_SIZE, batch, distance, gradient_sums, replica

CPU = torch.device("cpu")
NORM_TOKENS = 16


def vertex(name: str, prompt_ids: Sequence[int], num_tokens: int, *, temperature: float = 1.0) -> Vertex:
    dice = np.random.default_rng([ord(letter) for letter in name])
    return Vertex(
        invocation_id=name,
        episode_id=name.rpartition("-i")[0],
        agent="solver",
        policy="solver",
        index=0,
        parents=(),
        registered_s=0.0,
        seed=0,
        temperature=temperature,
        max_tokens=12,
        state=InvocationState.DONE,
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(dice.integers(0, VOCAB_SIZE, num_tokens).tolist()),
        logprobs=tuple(dice.normal(-3, 0.3, num_tokens).tolist()),
        version_spans=((0, 0, num_tokens),),
    )


def conversation(rewards: Sequence[float], member: int) -> list[Candidate]:
    """Turns of one agent, each prompt the whole past; each is scored for itself."""
    calls: list[Candidate] = []
    prompt_ids: tuple[int, ...] = (1, 2)
    for turn, reward in enumerate(rewards):
        made = vertex(f"g-m{member}-i{turn}", prompt_ids, 3 + member)
        calls.append(Candidate(vertex=made, member=member, reward=reward, round=turn))
        prompt_ids = (*prompt_ids, *made.token_ids, 7)
    return calls


def samples_of(group_id: str, calls: Sequence[Candidate], algorithm: PolicyGradient) -> list[Sample]:
    """The weighed samples of one complete group."""
    drawn = draw_group(
        run="r",
        step=1,
        policy="solver",
        group_id=group_id,
        task_id="t",
        calls=calls,
        seed=0,
        max_paths=None,
    )
    (samples,) = StepEstimates(algorithm, Aggregation.of(algorithm), {}).add(drawn)
    return samples


def rows_of(samples: Sequence[Sample]) -> list[TrainingRow]:
    return [sample.row for sample in samples if sample.row is not None]


@pytest.mark.parametrize(
    "algorithm",
    [
        HierarchicalGrpo(normalise="none"),
        DrMas(baseline_per="round"),
        Grpo(overlong=Overlong(buffer_tokens=12), normalise="none"),
    ],
    ids=["hierarchical", "per round", "overlong"],
)
def test_a_group_may_have_rows_with_and_without_an_advantage_for_each_token(
    tmp_path: Path, algorithm: PolicyGradient
) -> None:
    """Member 0's turns share a row and have unlike advantages; member 1's are rows of their own."""
    calls = [*conversation((1.0, 1.0), 0), *conversation((0.0, 1.0), 1)]
    if algorithm.overlong:  # a longer answer: another penalty in the same row
        calls[0:2] = [
            Candidate(vertex=made, member=0, reward=1.0, round=turn)
            for turn, made in enumerate(
                (vertex("g-m0-i0", (1, 2), 3), vertex("g-m0-i1", (1, 2, *calls[0].vertex.token_ids, 7), 6))
            )
        ]
    rows = rows_of(samples_of("g", calls, algorithm))
    assert {"advantages" in row.columns for row in rows} == {True, False}
    whole, apart = (replica(tmp_path / name, algorithm=algorithm.model_dump()) for name in ("whole", "apart"))
    whole.forward_backward(batch(rows, name="all"))
    for row in rows:
        apart.forward_backward(batch([row], name=row.sample_id))
    assert distance(*(gradient_sums(trainer, tmp_path) for trainer in (whole, apart))) < 1e-5


AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "episode-mean",
)


def aggregated(name: str, losses_BT: Tensor, mask_BT: Tensor, episodes: Sequence[str]) -> Tensor:
    """verl's `agg_loss`, and the mean over episodes of the mean over an episode's tokens."""
    if name == "token-mean":
        return (losses_BT * mask_BT).sum() / mask_BT.sum()
    sums_B, counts_B = (losses_BT * mask_BT).sum(-1), mask_BT.sum(-1)
    if name == "seq-mean-token-sum":
        return sums_B.mean()
    if name == "seq-mean-token-sum-norm":
        return sums_B.mean() / NORM_TOKENS
    if name == "seq-mean-token-mean":
        return (sums_B / counts_B).mean()
    means = []
    for episode in sorted(set(episodes)):
        is_its_B = torch.tensor([one == episode for one in episodes])
        means.append(sums_B[is_its_B].sum() / counts_B[is_its_B].sum())
    return torch.stack(means).mean()


def reference(network: Any, rows: Sequence[TrainingRow], algorithm: PolicyGradient) -> dict[str, Tensor]:
    """The gradient of the whole step's loss: PPO's clipped surrogate on padded rows."""
    length = max(len(row.token_ids) for row in rows)

    def padded(values: Sequence[Any]) -> Tensor:
        return torch.tensor(
            np.stack([np.pad(np.asarray(one), (0, length - len(one))) for one in values]),
            dtype=torch.float32,
        )

    ids_BT = padded([row.token_ids for row in rows]).long()
    mask_BT = padded([row.loss_mask for row in rows])[:, 1:]
    behaviour_BT = padded([row.logprobs for row in rows])[:, 1:]
    advantages_B1 = torch.tensor([[row.advantage] for row in rows])
    temperatures_B11 = torch.tensor([[[row.temperature]] for row in rows])
    logits_BTV = network(input_ids=ids_BT).logits[:, :-1] / temperatures_B11
    logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
    ratios_BT = torch.exp(logprobs_BT - behaviour_BT)
    clipped_BT = ratios_BT.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    losses_BT = -torch.minimum(ratios_BT * advantages_B1, clipped_BT * advantages_B1)
    total = aggregated(algorithm.aggregation, losses_BT, mask_BT, [row.episode_id for row in rows])
    network.zero_grad()
    total.backward()
    return {f"sums/{name}": value.grad for name, value in network.named_parameters()}


def parallel_calls(group_id: str, rewards: Sequence[Sequence[float]]) -> list[Candidate]:
    """Episodes of unlike numbers of calls, every call with its own prompt, length and temperature."""
    return [
        Candidate(
            vertex=vertex(
                f"{group_id}-m{member}-i{number}",
                range(1 + member + number),
                2 + (3 * member + 2 * number) % 7,
                temperature=1.0 + 0.2 * number,
            ),
            member=member,
            reward=reward,
        )
        for member, own in enumerate(rewards)
        for number, reward in enumerate(own)
    ]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_step_in_micro_batches_has_the_gradient_of_the_aggregated_loss(tmp_path: Path, name: Any) -> None:
    """Weights of rows, raw sums over three micro-batches, one division: together that is the definition."""
    norm_tokens = NORM_TOKENS if name == "seq-mean-token-sum-norm" else None
    algorithm = Grpo(aggregation=name, norm_tokens=norm_tokens)
    samples = [
        *samples_of("g0", parallel_calls("g0", [(1.0, 0.0, 2.0), (0.0,), (1.0, 3.0)]), algorithm),
        *samples_of("g1", parallel_calls("g1", [(1.0,), (1.0, 1.0)]), algorithm),  # no signal: dropped
        *samples_of("g2", parallel_calls("g2", [(0.5, 0.1), (0.4, 0.9, 0.0)]), algorithm),
    ]
    rows, denominator = rows_of(samples), Aggregation.of(algorithm).denominator(samples)
    assert len(rows) == 11 and len(samples) == 14
    trainer = replica(tmp_path / "w", algorithm=algorithm.model_dump())
    for number in range(3):
        trainer.forward_backward(batch(rows[number::3], name=str(number)))
    ours = {key: value / denominator for key, value in gradient_sums(trainer, tmp_path).items()}
    expected = reference(load_model(tmp_path / "w" / "v000000", CPU), rows, algorithm)
    assert distance(ours, expected) < 1e-5
    norm = torch.cat([value.flatten() for value in expected.values()]).norm()
    assert trainer.optim_step(scale=1.0 / denominator).grad_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_advantage_of_0_gives_the_update_of_the_next_float(tmp_path: Path, name: Any) -> None:
    """The middle reward's sample is not sent in one case and sent in the other; both times it counts."""
    norm_tokens = NORM_TOKENS if name == "seq-mean-token-sum-norm" else None
    algorithm = Grpo(aggregation=name, norm_tokens=norm_tokens)
    found, num_rows = [], []
    for middle in (0.5, 0.5 + 1e-6):
        # The sampler draws two paths of the last episode: one with an advantage of about 0, one without.
        samples = samples_of("g", parallel_calls("g", [(0.0,), (middle,), (1.0, middle)]), algorithm)
        rows, denominator = rows_of(samples), Aggregation.of(algorithm).denominator(samples)
        trainer = replica(tmp_path / str(middle), algorithm=algorithm.model_dump())
        trainer.forward_backward(batch(rows, name="all"))
        sums = gradient_sums(trainer, tmp_path)
        found.append({key: value / denominator for key, value in sums.items()})
        num_rows.append(len(rows))
    assert num_rows[0] < num_rows[1] == 4
    assert distance(*found) < 1e-4
