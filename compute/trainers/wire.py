"""Micro-batches and reports as plain messages and back: arrays travel as their bytes, types fixed here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from megloom.compute.trainers.protocol import (
    GradientReport,
    MicroBatch,
    Published,
    TrainingRow,
    UpdateReport,
)

_DTYPES = {"token_ids": "<i4", "loss_mask": "|u1", "logprobs": "<f4"}


def pack_micro_batch(batch: MicroBatch) -> dict[str, Any]:
    """The micro-batch as a message.

    Raises: ValueError if an array of a row has another type than `TrainingRow` says.
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


def pack_report(report: Published | GradientReport | UpdateReport) -> dict[str, Any]:
    """Any answer of a trainer as a message."""
    return asdict(report)


def unpack_published(message: dict[str, Any]) -> Published:
    return Published(**message)


def unpack_gradient(message: dict[str, Any]) -> GradientReport:
    return GradientReport(**message)


def unpack_update(message: dict[str, Any]) -> UpdateReport:
    return UpdateReport(**{**message, "micro_batch_ids": tuple(message["micro_batch_ids"])})


def _pack_row(row: TrainingRow) -> dict[str, Any]:
    message: dict[str, Any] = {
        "sample_id": row.sample_id,
        "advantage": float(row.advantage),
        "weight": float(row.weight),
        "temperature": float(row.temperature),
    }
    for name, dtype in _DTYPES.items():
        values = getattr(row, name)
        if values.dtype != np.dtype(dtype) or values.ndim != 1:
            raise ValueError(
                f"sample {row.sample_id}: {name} is {values.dtype} of {values.ndim} dimensions, "
                f"expected {np.dtype(dtype)} of 1"
            )
        message[name] = values.tobytes()
    return message


def _unpack_row(message: dict[str, Any]) -> TrainingRow:
    arrays = {name: np.frombuffer(message[name], dtype=dtype) for name, dtype in _DTYPES.items()}
    return TrainingRow(**{**message, **arrays})
