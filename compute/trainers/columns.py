"""`forward`: columns of rows under the loaded weights, without a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megloom.compute.trainers.heads import read_out
from megloom.compute.trainers.passes import Pass
from megloom.compute.trainers.protocol import FORWARD_COLUMNS, TrainerError, TrainingRow

OF_THE_POLICY = frozenset({"values", "proximal_logprobs"})  # the others come from the reference model


def check_wants(wants: Sequence[str], *, has_critic: bool, has_reference: bool) -> None:
    """Refuses columns that cannot be given.

    Raises: TrainerError naming the column and what is missing.
    """
    for name in wants:
        if name not in FORWARD_COLUMNS:
            raise TrainerError(f"column {name!r}, expected one of {', '.join(FORWARD_COLUMNS)}")
    if "values" in wants and not has_critic:
        raise TrainerError("column 'values', but the policy's algorithm has no critic")
    if "reference_logprobs" in wants and not has_reference:
        raise TrainerError("column 'reference_logprobs', but no reference version was loaded")


@torch.no_grad()
def compute_columns(
    wants: Sequence[str],
    part: Pass,
    *,
    model: Any,
    value_head: nn.Module | None,
    reference: Callable[[], Any] | None,
) -> dict[str, Tensor]:
    """The wanted columns of one pass, each [N]; `reference` gives the reference model when it is needed."""
    columns_N: dict[str, Tensor] = {}
    if OF_THE_POLICY & set(wants):
        readout = read_out(model, part, value_head=value_head)
        columns_N["proximal_logprobs"] = readout.logprobs_N
        if readout.values_N is not None:
            columns_N["values"] = readout.values_N
    if "reference_logprobs" in wants:
        assert reference is not None, "check_wants comes first"
        columns_N["reference_logprobs"] = read_out(reference(), part).logprobs_N
    return {name: columns_N[name] for name in wants}


class Columns:
    """Columns of `rows`, filled pass by pass; 0 where a token is not trainable.

    A number that is not finite is refused at the end only: until then other ranks wait for every pass.
    """

    def __init__(self, rows: Sequence[TrainingRow], wants: Sequence[str]) -> None:
        self._rows = {row.sample_id: row for row in rows}
        if len(self._rows) != len(rows):
            twice = sorted({row.sample_id for row in rows if self._rows[row.sample_id] is not row})
            raise TrainerError(f"samples {', '.join(twice)} are there twice")
        self._arrays: dict[str, dict[str, npt.NDArray[np.float32]]] = {
            name: {row.sample_id: np.zeros(len(row.token_ids), np.float32) for row in rows} for name in wants
        }

    def fill(self, part: Pass, columns_N: dict[str, Tensor]) -> None:
        """Puts a pass's numbers to their tokens: within a row they stand in the order of its tokens."""
        rows_N = part.rows_N.cpu().numpy()
        for name, values_N in columns_N.items():
            values = values_N.float().cpu().numpy()
            for number, sample_id in enumerate(part.sample_ids):
                places = np.flatnonzero(self._rows[sample_id].loss_mask)
                self._arrays[name][sample_id][places] = values[rows_N == number]

    def by_name(self) -> dict[str, list[npt.NDArray[np.float32]]]:
        """The columns, by name and then in the order of the rows.

        Raises: TrainerError naming the sample, if a number is not finite.
        """
        for name, arrays in self._arrays.items():
            for sample_id, values in arrays.items():
                if not np.isfinite(values).all():
                    place = np.flatnonzero(~np.isfinite(values))[0]
                    raise TrainerError(f"sample {sample_id}: {name} of token {place} is {values[place]}")
        return {name: [arrays[key] for key in self._rows] for name, arrays in self._arrays.items()}
