"""Micro-batches and reports as plain messages and back: arrays travel as their bytes, types fixed here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from megloom.compute.trainers.protocol import (
    COLUMNS,
    ForwardReport,
    GradientReport,
    GradientSums,
    MicroBatch,
    Published,
    TrainingRow,
    UpdateReport,
)

_DTYPES = {"token_ids": "<i4", "loss_mask": "|u1", "logprobs": "<f4"}
_COLUMN_DTYPE = "<f4"


def pack_micro_batch(batch: MicroBatch) -> dict[str, Any]:
    """The micro-batch as a message.

    Raises: ValueError if an array of a row has another type than `TrainingRow` says, or an unknown name.
    """
    return {
        "micro_batch_id": batch.micro_batch_id,
        "loss": batch.loss,
        "rows": [_pack_row(row) for row in batch.rows],
    }


def unpack_micro_batch(message: dict[str, Any]) -> MicroBatch:
    """The inverse of `pack_micro_batch`; the arrays are read-only views of the message."""
    return MicroBatch(
        micro_batch_id=message["micro_batch_id"],
        loss=message["loss"],
        rows=tuple(_unpack_row(row) for row in message["rows"]),
    )


def pack_report(report: Published | GradientReport | GradientSums | UpdateReport) -> dict[str, Any]:
    """Any answer of a trainer but `forward`'s as a message."""
    return asdict(report)


def pack_forward(report: ForwardReport) -> dict[str, Any]:
    columns = {
        name: [array.astype(_COLUMN_DTYPE, copy=False).tobytes() for array in arrays]
        for name, arrays in report.columns.items()
    }
    return {"columns": columns, "seconds": report.seconds}


def unpack_forward(message: dict[str, Any]) -> ForwardReport:
    """The inverse of `pack_forward`; the arrays are read-only views of the message."""
    columns = {
        name: [np.frombuffer(data, dtype=_COLUMN_DTYPE) for data in arrays]
        for name, arrays in message["columns"].items()
    }
    return ForwardReport(columns=columns, seconds=message["seconds"])


def unpack_published(message: dict[str, Any]) -> Published:
    return Published(**message)


def unpack_gradient(message: dict[str, Any]) -> GradientReport:
    sums = {name: (total, count) for name, (total, count) in message["sums"].items()}
    return GradientReport(**{**message, "sums": sums})


def unpack_sums(message: dict[str, Any]) -> GradientSums:
    return GradientSums(**{**message, "micro_batch_ids": tuple(message["micro_batch_ids"])})


def unpack_update(message: dict[str, Any]) -> UpdateReport:
    return UpdateReport(**{**message, "micro_batch_ids": tuple(message["micro_batch_ids"])})


def _pack_row(row: TrainingRow) -> dict[str, Any]:
    unknown = sorted(row.columns.keys() - set(COLUMNS))
    if unknown:
        raise ValueError(f"sample {row.sample_id}: columns {unknown}, expected some of {COLUMNS}")
    return {
        "sample_id": row.sample_id,
        "advantage": float(row.advantage),
        "weight": float(row.weight),
        "temperature": float(row.temperature),
        "episode_id": row.episode_id,
        "version_min": row.version_min,
        "columns": {
            name: _array_bytes(row, name, values, _COLUMN_DTYPE) for name, values in row.columns.items()
        },
        **{name: _array_bytes(row, name, getattr(row, name), dtype) for name, dtype in _DTYPES.items()},
    }


def _array_bytes(row: TrainingRow, name: str, values: npt.NDArray[Any], dtype: str) -> bytes:
    if values.dtype != np.dtype(dtype) or values.ndim != 1:
        raise ValueError(
            f"sample {row.sample_id}: {name} is {values.dtype} of {values.ndim} dimensions, "
            f"expected {np.dtype(dtype)} of 1"
        )
    return values.tobytes()


def _unpack_row(message: dict[str, Any]) -> TrainingRow:
    arrays = {name: np.frombuffer(message[name], dtype=dtype) for name, dtype in _DTYPES.items()}
    columns = {name: np.frombuffer(data, dtype=_COLUMN_DTYPE) for name, data in message["columns"].items()}
    return TrainingRow(**{**message, **arrays, "columns": columns})
