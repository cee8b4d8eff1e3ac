"""Lag is the trainer's version less that of a sample's oldest token, taken where the sample is consumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megloom.compute.algorithms.base import Correction
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.replica import Replica

from .builders import batch, gradient_sums, plan, ragged_rows, replica, row

TIS = Grpo(correction=Correction(name="token-tis")).model_dump()


def trainer_at(folder: Path, version: int, *, bound: int) -> Replica:
    trainer = replica(folder, algorithm=TIS, max_off_policy_steps=bound)
    trainer.publish(weights_dir=str(folder), version=version)
    return trainer


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_is_inclusive(tmp_path: Path, bound: int) -> None:
    trainer = trainer_at(tmp_path, 5, bound=bound)
    trainer.forward_backward(batch([row(1, version_min=5 - bound), row(2, version_min=5)]))
    before = gradient_sums(trainer, tmp_path / "peek")
    late = row(3, version_min=5 - bound - 1)
    expected = (
        f"policy=solver forward_backward late: sample sample-3: its oldest token is of version {4 - bound}, "
        f"the trainer is at version 5: {bound + 1} off-policy steps, at most {bound} are allowed"
    )
    with pytest.raises(TrainerError, match=expected):
        trainer.forward_backward(batch([row(4, version_min=5), late], name="late"))
    after = gradient_sums(trainer, tmp_path / "peek")
    assert all(before[name].equal(after[name]) for name in before)


def test_a_sample_of_the_future_is_not_young_but_wrong(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, 2, bound=4)
    with pytest.raises(TrainerError, match="sample sample-1: its tokens are of version 3 and up, newer than"):
        trainer.forward_backward(batch([row(1, version_min=3)]))


def test_updates_that_were_not_published_count_too(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, 1, bound=1)
    for name in ("a", "b"):
        trainer.forward_backward(batch([row(1, version_min=1)], name=name))
        trainer.optim_step(scale=1.0)
    with pytest.raises(TrainerError, match="of version 1, the trainer is at version 3: 2 off-policy steps"):
        trainer.forward_backward(batch([row(1, version_min=1)], name="c"))
    trainer.publish(weights_dir=str(tmp_path), version=2)
    trainer.forward_backward(batch([row(1, version_min=1)], name="c"))


def test_an_update_without_a_trainable_token_is_no_update(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, 1, bound=0)
    trainer.forward_backward(batch([], name="empty"))
    trainer.optim_step(scale=1.0)
    trainer.forward_backward(batch([row(1, version_min=1)]))


def test_a_restored_trainer_knows_its_unpublished_updates(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, 1, bound=0)
    trainer.forward_backward(batch([row(1, version_min=1)]))
    trainer.optim_step(scale=1.0)
    trainer.save(state_path=str(tmp_path / "state"))
    again = Replica(plan(algorithm=TIS))
    again.load(weights_uri=str(tmp_path / "v000001"), state_path=str(tmp_path / "state"))
    with pytest.raises(TrainerError, match="the trainer is at version 2: 1 off-policy steps"):
        again.forward_backward(batch([row(1, version_min=1)]))
    trainer.publish(weights_dir=str(tmp_path), version=2)
    again.load(weights_uri=str(tmp_path / "v000002"), state_path=str(tmp_path / "state"))
    again.forward_backward(batch([row(1, version_min=2)]))


def test_demonstrations_have_no_age(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, 9, bound=0)
    trainer.forward_backward(batch([row(1)]))
    trainer.forward_backward(batch([row(1, version_min=0)], name="warm", loss="imitation"))


def test_a_correction_weighs_old_samples_and_says_so(tmp_path: Path) -> None:
    rows = [row(i, version_min=0) for i in range(4)]
    plain = replica(tmp_path / "w")
    corrected = replica(tmp_path / "w", algorithm=TIS, max_off_policy_steps=1)
    masked = Grpo(correction=Correction(name="icepop", low=0.999, high=1.001)).model_dump()
    popped = replica(tmp_path / "w", algorithm=masked, max_off_policy_steps=1)
    reports = [trainer.forward_backward(batch(rows)) for trainer in (plain, corrected, popped)]
    assert "correction" not in reports[0].sums
    total, count = reports[1].sums["correction"]
    assert count == reports[1].num_trainable and 0 < total < 2.0 * count
    assert reports[1].num_clipped == 0, "on its own weights the surrogate's ratio is 1"
    num_rejected, count = reports[2].sums["num_rejected"]
    assert num_rejected == count == reports[2].num_trainable
    assert not any(value.any() for value in gradient_sums(popped, tmp_path).values())


def test_a_report_says_how_many_tokens_went_through_the_model(tmp_path: Path) -> None:
    rows = ragged_rows(6)
    report = replica(tmp_path / "w").forward_backward(batch(rows))
    num_computed, num_tokens = report.sums["num_computed"]
    assert num_tokens == report.num_tokens and num_computed > 0
