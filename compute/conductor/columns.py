"""What a loss needs of every token before its gradient: columns of the forward pass, and a critic's.

Called by a lane, once per micro-batch. Only trainable tokens have values; the rest of a column is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megloom.compute.algorithms.base import PolicyGradient
from megloom.compute.conductor.samples import spread
from megloom.compute.trainers.protocol import ForwardReport, TrainerError, TrainingRow


def with_columns(
    rows: Sequence[TrainingRow], report: ForwardReport, wants: Sequence[str], algorithm: PolicyGradient
) -> tuple[TrainingRow, ...]:
    """The rows with the columns `wants` of the report and, for a critic, its advantages and returns.

    Raises: TrainerError naming the column that is missing, or the sample whose column does not fit.
    """
    for name in wants:
        if len(report.columns.get(name, ())) != len(rows):
            num = len(report.columns.get(name, ()))
            raise TrainerError(f"forward gave column {name} for {num} rows, expected {len(rows)}")
    return tuple(_filled(row, position, report, wants, algorithm) for position, row in enumerate(rows))


def mean_advantage(row: TrainingRow) -> float:
    """The mean of the row's token advantages."""
    values = row.columns["advantages"][row.loss_mask.astype(bool)].tolist()
    return math.fsum(values) / len(values)


def _filled(
    row: TrainingRow, position: int, report: ForwardReport, wants: Sequence[str], algorithm: PolicyGradient
) -> TrainingRow:
    columns = dict(row.columns)
    for name in wants:
        column = report.columns[name][position]
        if len(column) != len(row.token_ids):
            raise TrainerError(
                f"sample {row.sample_id}: column {name} has {len(column)} values, "
                f"expected one for each of {len(row.token_ids)} tokens"
            )
        columns[name] = column
    if algorithm.has_critic:
        values = columns["values"][row.loss_mask.astype(bool)].tolist()
        made = algorithm.columns(row.advantage, values)
        columns.update({name: spread(row.loss_mask, numbers) for name, numbers in made.items()})
    return replace(row, columns=columns)
