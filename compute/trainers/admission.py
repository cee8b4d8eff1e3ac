"""Which rows may enter a micro-batch: whole ones, young enough, with the columns that their loss needs."""

from __future__ import annotations

from collections.abc import Sequence

from megloom.compute.trainers.objective import IMITATION, POLICY_GRADIENT, check_columns
from megloom.compute.trainers.passes import check_row, other_columns
from megloom.compute.trainers.protocol import MicroBatch, TrainerError, TrainingRow


def check_batch(
    batch: MicroBatch,
    *,
    vocab_size: int,
    columns: tuple[str, ...],
    trainer_version: int,
    max_off_policy_steps: int,
) -> None:
    """Refuses a micro-batch that must not become a gradient; imitation needs neither columns nor youth.

    Raises: TrainerError naming the sample and what is wrong.
    """
    if batch.loss not in (POLICY_GRADIENT, IMITATION):
        raise TrainerError(f"loss {batch.loss!r}, expected {POLICY_GRADIENT} or {IMITATION}")
    is_policy_gradient = batch.loss == POLICY_GRADIENT
    for row in batch.rows:
        check_row(row, vocab_size=vocab_size, needs_behaviour=is_policy_gradient)
        if is_policy_gradient and row.loss_mask.any():
            check_columns(row, columns)
            check_lag(row, trainer_version=trainer_version, bound=max_off_policy_steps)
    if is_policy_gradient:
        _check_same_columns(batch.rows)


def check_lag(row: TrainingRow, *, trainer_version: int, bound: int) -> None:
    """Refuses a row whose oldest trainable token is more than `bound` versions behind the trainer.

    The lag is taken here, where the row is consumed: trainer version − oldest version in the row.
    Raises: TrainerError naming the sample, both versions and the bound.
    """
    if row.version_min is None:
        return
    lag = trainer_version - row.version_min
    if lag > bound:
        raise TrainerError(
            f"sample {row.sample_id}: its oldest token is of version {row.version_min}, the trainer is at "
            f"version {trainer_version}: {lag} off-policy steps, at most {bound} are allowed"
        )
    if lag < 0:
        raise TrainerError(
            f"sample {row.sample_id}: its tokens are of version {row.version_min} and up, newer than "
            f"the trainer's version {trainer_version}"
        )


def _check_same_columns(rows: Sequence[TrainingRow]) -> None:
    """Columns are those of all rows or of none: rows of two kinds cannot share a pass. All but
    "advantages", which `row.advantage` stands in for.
    """
    trained = [row for row in rows if row.loss_mask.any()]
    for row in trained:
        if other_columns(row) != other_columns(trained[0]):
            raise TrainerError(
                f"sample {row.sample_id}: columns {sorted(row.columns)}, "
                f"but sample {trained[0].sample_id} has {sorted(trained[0].columns)}"
            )
