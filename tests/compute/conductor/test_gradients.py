"""The lane: columns before gradients, a critic's advantages, and a lost trainer in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megloom.compute.algorithms.base import Kl, PolicyGradient
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.conductor.columns import with_columns
from megloom.compute.conductor.estimates import StepEstimates
from megloom.compute.conductor.events import EventLog
from megloom.compute.conductor.gradients import GradientLane, LaneStep
from megloom.compute.conductor.samples import Aggregation
from megloom.compute.conductor.session import explain
from megloom.compute.graph.states import SampleState
from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    MicroBatch,
    Trainer,
    TrainerError,
    TrainerLost,
)
from tests.compute.conductor.training_rows import FakeTrainer, drawn_group

REWARDS = [1.0, 0.0]


def value_of(sample_id: str, name: str, num_tokens: int) -> Any:
    """A value for every token, also for those that are not trainable."""
    return np.linspace(0.1, 0.5, num_tokens, dtype=np.float32)


def lane_step(
    algorithm: PolicyGradient,
    trainers: Sequence[FakeTrainer | None],
    *,
    records: list[Any] | None = None,
    rewards: Sequence[float] = REWARDS,
    num_groups: int = 2,
) -> tuple[LaneStep, GradientLane]:
    """A step of groups, each a micro-batch; a lost trainer is followed by the next of `trainers`.

    One that is None does not come up.
    """
    lives = iter(trainers[1:])

    async def restart(policy: str) -> Trainer:
        trainer = next(lives)
        if trainer is None:
            raise TrainerLost("it does not come up")
        return trainer  # type: ignore[return-value]

    async def main() -> tuple[LaneStep, GradientLane]:
        lane = GradientLane(
            run="r",
            policy="solver",
            algorithm=algorithm,
            trainer=trainers[0],  # type: ignore[arg-type]
            restart=restart,
            groups_per_batch=1,
            hold=False,
            record=(records if records is not None else []).append,
            clock=lambda: 0.0,
            events=EventLog(lambda: 0.0),
        )
        estimates = StepEstimates(algorithm, Aggregation.of(algorithm), {})
        async with asyncio.TaskGroup() as tasks:
            lane.open(1, 0, tasks)
            for number in range(num_groups):
                for samples in estimates.add(drawn_group(number, rewards)):
                    lane.add_group(samples)
            for samples in estimates.close():
                lane.add_group(samples)
            work = await lane.close()
        await lane.finish(denominator=1, version=1, weights_dir="w", state_path="s")
        lane.record_step()
        return work, lane

    return asyncio.run(main())


def test_a_loss_that_needs_no_columns_asks_for_no_forward_pass() -> None:
    trainer = FakeTrainer()
    lane_step(Grpo(), [trainer])
    assert trainer.asked == [] and len(trainer.batches) == 2


def test_a_kl_term_has_the_references_logprobs_in_every_row_before_the_gradient() -> None:
    trainer = FakeTrainer(value_of)
    lane_step(Grpo(kl=Kl(coefficient=0.1)), [trainer])
    assert trainer.asked == [("reference_logprobs",)] * 2
    for row in [row for batch in trainer.batches for row in batch.rows]:
        assert np.array_equal(row.columns["reference_logprobs"], value_of("", "", len(row.token_ids)))
        assert "advantages" not in row.columns


def test_a_critics_advantages_and_returns_come_from_the_values_of_the_trainable_tokens() -> None:
    trainer, algorithm = FakeTrainer(value_of), Ppo(gamma=0.9, lam=0.8)
    lane_step(algorithm, [trainer])
    rows = [row for batch in trainer.batches for row in batch.rows]
    assert len(rows) == 4  # a reward of 0 has advantages all the same
    for row, reward in zip(rows, REWARDS * 2, strict=True):
        trainable = row.loss_mask.astype(bool)
        expected = algorithm.columns(reward, row.columns["values"][trainable].tolist())
        for name, column in expected.items():
            assert row.columns[name].dtype == np.float32 and row.columns[name].shape == row.token_ids.shape
            assert row.columns[name][trainable] == pytest.approx(column, abs=1e-6)
            assert not row.columns[name][~trainable].any()


def test_the_record_of_a_critics_sample_has_the_mean_of_its_advantages() -> None:
    records: list[Any] = []
    trainer = FakeTrainer(value_of)
    lane_step(Ppo(), [trainer], records=records)
    rows = {row.sample_id: row for batch in trainer.batches for row in batch.rows}
    samples = [record for record in records if hasattr(record, "advantage")]
    assert len(samples) == 4
    for sample in samples:
        row = rows[sample.sample_id]
        mean = float(row.columns["advantages"][row.loss_mask.astype(bool)].mean())
        assert sample.advantage == pytest.approx(mean, abs=1e-6)
        assert sample.reward in REWARDS and sample.state == "applied"


@pytest.mark.parametrize("verb", ["forward", "forward_backward", "optim_step"])
def test_a_trainer_that_is_lost_gives_the_same_rows_to_the_next(verb: str) -> None:
    calm = FakeTrainer(value_of)
    lane_step(Ppo(), [calm])
    lost, next_one = FakeTrainer(value_of, dies_in=[verb]), FakeTrainer(value_of)
    work, _ = lane_step(Ppo(), [lost, next_one])
    assert work.update is not None
    assert work.update.micro_batch_ids == tuple(batch.micro_batch_id for batch in calm.batches)
    for ours, theirs in zip(next_one.batches, calm.batches, strict=True):
        for row, other in zip(ours.rows, theirs.rows, strict=True):
            assert row.sample_id == other.sample_id
            assert all(np.array_equal(row.columns[name], other.columns[name]) for name in other.columns)
    if verb != "forward":
        assert next_one.asked == [("values",)] * (2 - len(lost.asked))  # a replay asks for nothing again


class DyingTrainer(FakeTrainer):
    """It dies in its n-th gradient, or in its update."""

    def __init__(self, gradients: int = -1, **options: Any) -> None:
        super().__init__(value_of, **options)
        self._gradients = gradients

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        self._gradients -= 1
        if self._gradients == 0:
            self._is_lost = True
        return await super().forward_backward(batch)


@pytest.mark.parametrize("second", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [1, 2, 3, 4, "optim_step"])
@pytest.mark.parametrize("comes_up", [True, False])
def test_a_trainer_that_is_lost_in_a_replay_skips_no_micro_batch(
    first: int | str, second: int, comes_up: bool
) -> None:
    one = DyingTrainer(first) if isinstance(first, int) else DyingTrainer(dies_in=["optim_step"])
    trainers = [one, DyingTrainer(second) if comes_up else None, FakeTrainer(value_of), FakeTrainer(value_of)]
    work, _ = lane_step(Ppo(), trainers, num_groups=4)
    names = [taken.batch.micro_batch_id for taken in work.taken]
    assert len(names) == 4 and work.update is not None and list(work.update.micro_batch_ids) == names
    assert {taken.state for taken in work.taken} == {SampleState.GRADIENT_TAKEN}


def test_a_trainer_that_is_lost_each_time_ends_the_session_with_its_cause() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        lane_step(Ppo(), [DyingTrainer(1) for _ in range(9)])
    assert "trainer of solver was lost 3 times in a row: lost in" in explain(caught.value)


@pytest.mark.parametrize(
    ("column", "complaint"),
    [
        ({}, "forward gave column values for 0 rows, expected 2"),
        ({"values": [np.zeros(5, np.float32)]}, "forward gave column values for 1 rows, expected 2"),
        (
            {"values": [np.zeros(5, np.float32), np.zeros(5, np.float32)]},
            "sample g0-m1-i0-s: column values has 5 values, expected one for each of 6 tokens",
        ),
    ],
)
def test_columns_that_do_not_fit_their_rows_are_refused(column: dict[str, Any], complaint: str) -> None:
    estimates = StepEstimates(Ppo(), Aggregation.of(Ppo()), {})
    ((first, second),) = estimates.add(drawn_group(0, REWARDS))
    assert first.row is not None and second.row is not None
    with pytest.raises(TrainerError, match=complaint):
        with_columns((first.row, second.row), ForwardReport(columns=column, seconds=0.0), ("values",), Ppo())
