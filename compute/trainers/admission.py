"""Which rows may enter a micro-batch: whole ones, young enough, with the columns that their loss needs."""

from __future__ import annotations

from collections.abc import Sequence

from megloom.compute.scheduling.staleness import check_lag
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
            _check_age(row, trainer_version=trainer_version, bound=max_off_policy_steps)
    if is_policy_gradient:
        _check_same_columns(batch.rows)


def _check_age(row: TrainingRow, *, trainer_version: int, bound: int) -> None:
    """The lag is taken here, where the row is consumed.

    Raises: TrainerError naming the sample, both versions and the bound.
    """
    try:
        check_lag(
            row.sample_id,
            trainer_version=trainer_version,
            version_min=row.version_min,
            max_off_policy_steps=bound,
        )
    except ValueError as error:
        raise TrainerError(str(error)) from None


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
