"""Rows cut into forward passes under a token budget, and the model's logprobs of their trainable tokens.

Rows are sorted by length and padded on the right: under a causal mask no real token sees padding, and rows
never see each other. So no attention mask is needed. On a CPU a pass of about 1,000 tokens, whose activations
stay in the cache, is a third faster than one of 4,000, and sorted padding is as fast as packed rows.
The cut depends on the rows alone: the same micro-batch always gives the same passes.
Shapes: B = rows of a pass, T = its longest row, N = its trainable tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megloom.compute.trainers.protocol import TrainerError, TrainingRow

DEFAULT_BUDGET_TOKENS = {"cpu": 1024, "cuda": 32768}
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward pass. `positions_N` index the flat [B·T] hidden states that predict `targets_N`."""

    sample_ids: tuple[str, ...]
    token_ids_BT: Tensor
    positions_N: Tensor
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    temperatures_N: Tensor
    rows_N: Tensor

    def sample_of(self, index: int) -> str:
        """The sample that trainable token `index` belongs to."""
        return self.sample_ids[int(self.rows_N[index])]


def check_row(row: TrainingRow, *, vocab_size: int, needs_behaviour: bool) -> None:
    """Refuses a row that would poison the sums.

    Raises: TrainerError naming the sample and what is wrong.
    """
    mask = row.loss_mask != 0
    lengths = {len(row.token_ids), len(row.loss_mask), len(row.logprobs)}
    if len(lengths) != 1 or 0 in lengths:
        raise TrainerError(f"sample {row.sample_id}: arrays of lengths {sorted(lengths)}, expected one > 0")
    if row.token_ids.min() < 0 or row.token_ids.max() >= vocab_size:
        raise TrainerError(f"sample {row.sample_id}: a token id outside the vocabulary of {vocab_size}")
    if mask[0]:
        raise TrainerError(f"sample {row.sample_id}: token 0 is trainable, but it has no prefix")
    if not mask.any():
        return
    if not row.temperature > 0:
        raise TrainerError(f"sample {row.sample_id}: temperature {row.temperature}, expected above 0")
    if not (abs(row.advantage) <= _MAX_FLOAT32 and abs(row.weight) <= _MAX_FLOAT32):
        raise TrainerError(f"sample {row.sample_id}: advantage {row.advantage}, weight {row.weight}")
    if needs_behaviour and not np.isfinite(row.logprobs[mask]).all():
        where = np.flatnonzero(mask & ~np.isfinite(row.logprobs))
        raise TrainerError(
            f"sample {row.sample_id}: behaviour logprob of token {where[0]} is {row.logprobs[where[0]]}"
        )


def cut(rows: Sequence[TrainingRow], budget_tokens: int) -> list[list[TrainingRow]]:
    """The rows, sorted by length, in passes of at most `budget_tokens` padded tokens.

    A row above the budget gets a pass of its own.
    """
    passes: list[list[TrainingRow]] = []
    for row in sorted(rows, key=lambda row: len(row.token_ids)):  # stable: equal lengths keep their order
        if passes and (len(passes[-1]) + 1) * len(row.token_ids) <= budget_tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def collate(rows: Sequence[TrainingRow], device: torch.device) -> Pass:
    """The tensors of one pass on `device`. Masked slots are never read."""
    length = max(len(row.token_ids) for row in rows)
    token_ids_BT = np.zeros((len(rows), length), dtype=np.int64)
    trainable = [np.flatnonzero(row.loss_mask) for row in rows]
    for number, row in enumerate(rows):
        token_ids_BT[number, : len(row.token_ids)] = row.token_ids
    positions = [number * length + indices - 1 for number, indices in enumerate(trainable)]
    counts = [len(indices) for indices in trainable]

    def per_token(values: list[Any], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)).to(device)

    def joined(pieces: list[Any], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate(pieces).astype(dtype)).to(device)

    pairs = list(zip(rows, trainable, strict=True))
    return Pass(
        sample_ids=tuple(row.sample_id for row in rows),
        token_ids_BT=torch.from_numpy(token_ids_BT).to(device),
        positions_N=joined(positions, np.int64),
        targets_N=joined([row.token_ids[indices] for row, indices in pairs], np.int64),
        behaviour_N=joined([row.logprobs[indices] for row, indices in pairs], np.float32),
        advantages_N=per_token([row.advantage for row in rows], np.float32),
        weights_N=per_token([row.weight for row in rows], np.float32),
        temperatures_N=per_token([row.temperature for row in rows], np.float32),
        rows_N=per_token(list(range(len(rows))), np.int64),
    )


def token_logprobs(model: Any, batch: Pass) -> Tensor:
    """log softmax(logits / temperature) of the trainable tokens, [N], float32, with the graph.

    The LM head sees only hidden states that predict a trainable token: logits are [N, V], never [B, T, V].
    """
    hidden_BTH = model.base_model(input_ids=batch.token_ids_BT, use_cache=False).last_hidden_state
    hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, batch.positions_N)
    logits_NV = model.get_output_embeddings()(hidden_NH).float() / batch.temperatures_N[:, None]
    return -torch.nn.functional.cross_entropy(logits_NV, batch.targets_N, reduction="none")
