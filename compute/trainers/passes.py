"""Rows become forward passes under a token budget, and passes the hidden states that predict their tokens.

Three layouts, chosen for each pass from its rows alone, so that the same micro-batch always gives the same
passes:

    padded   rows sorted by length, padded on the right; a causal mask is all they need
    packed   rows one after another in one line, no padding and no attention between them
    tree     rows with common prefixes in one line, what they share computed once (`tree`, `forest`)

A row goes through the model up to its last trainable token: what follows predicts nothing.
Shapes: B = rows of a pass, T = its longest row or line, N = its trainable tokens, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megloom.compute.trainers.forest import lay_out
from megloom.compute.trainers.forest_attention import LineAttention, line_attention, use_forest_attention
from megloom.compute.trainers.protocol import TrainerError, TrainingRow
from megloom.compute.trainers.tree import Tree, find_trees, num_needed, split

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The most tokens of a pass: of unrelated rows, padding included, and of a tree.

    Unrelated rows gain nothing from a longer pass once it fills the machine; a tree that is cut repeats what
    its parts share.
    """

    rows: int
    tree: int


# On a CPU a pass of about 1,000 tokens, whose activations stay in the cache, is a third faster than one of
# 4,000: less than a tree of that size saves.
DEFAULT_BUDGET_TOKENS = {"cpu": Budget(rows=1024, tree=4096), "cuda": Budget(rows=32768, tree=32768)}
# Packing costs an attention call for every hundred tokens or so and saves what padding would add. Measured on
# CPU with models of 0.2 to 26 M parameters: even at 4 %, 10 to 13 % faster at 12 to 33 %.
_MAX_PADDED = 1.05
_MIN_SAVED = 0.1  # the share of a row's tokens that must be there already for it to join a tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The rows of one pass. `shared` lays them in one line (see `tree.Tree`), None pads them."""

    rows: tuple[TrainingRow, ...]
    shared: tuple[int, ...] | None = None

    @property
    def num_computed(self) -> int:
        """The tokens that go through the model, padding included."""
        lengths = [num_needed(row) for row in self.rows]
        if self.shared is None:
            return max(lengths, default=1) * max(1, len(lengths))
        return sum(lengths) - sum(self.shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward pass. `positions_N` index the flat [B·T] hidden states that predict `targets_N`; two tokens
    may have the same one. `rows_N` is the row of each token, all tokens of a row are in one pass.

    `position_ids_BT` and `attention` are None for padded rows. `columns_N` are the rows' columns by name, all
    but the advantages, which are in `advantages_N`.
    """

    sample_ids: tuple[str, ...]
    token_ids_BT: Tensor
    position_ids_BT: Tensor | None
    attention: LineAttention | None
    num_computed: int
    positions_N: Tensor
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    temperatures_N: Tensor
    rows_N: Tensor
    columns_N: Mapping[str, Tensor]

    def sample_of(self, index: int) -> str:
        """The sample that trainable token `index` belongs to."""
        return self.sample_ids[int(self.rows_N[index])]


def check_row(row: TrainingRow, *, vocab_size: int, needs_behaviour: bool) -> None:
    """Refuses a row that would poison the sums.

    Raises: TrainerError naming the sample and what is wrong.
    """
    mask = row.loss_mask != 0
    arrays: list[Any] = [row.token_ids, row.loss_mask, row.logprobs, *row.columns.values()]
    lengths = {len(array) for array in arrays}
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
    named = [*row.columns.items(), *([("behaviour logprob", row.logprobs)] if needs_behaviour else [])]
    for name, values in named:
        if not np.isfinite(values[mask]).all():
            where = np.flatnonzero(mask & ~np.isfinite(values))[0]
            raise TrainerError(f"sample {row.sample_id}: {name} of token {where} is {values[where]}")


def cut(
    rows: Sequence[TrainingRow],
    budget_tokens: int | Budget,
    *,
    packing: bool = True,
    shared_prefixes: bool = True,
    min_saved: float = _MIN_SAVED,
) -> list[Part]:
    """The rows in passes of at most `budget_tokens`, padding included; a row above it gets one of its own.

    A number bounds every pass. Without `packing` unrelated rows are always padded; with it they are packed
    where that is estimated to be faster. Without `shared_prefixes` all rows are unrelated.
    """
    budget = (
        budget_tokens if isinstance(budget_tokens, Budget) else Budget(rows=budget_tokens, tree=budget_tokens)
    )
    if not shared_prefixes:
        return _cut_unrelated(rows, budget.rows, packing)
    trees: list[Tree] = []
    alone: list[TrainingRow] = []
    for tree in find_trees(rows, min_saved=min_saved):
        for piece in split(tree, budget.tree):
            if len(piece.rows) > 1:
                trees.append(piece)
            else:
                alone.extend(piece.rows)
    order = {id(row): number for number, row in enumerate(rows)}
    alone.sort(key=lambda row: order[id(row)])  # as given, so that sharing elsewhere does not move these rows
    return [*_cut_unrelated(alone, budget.rows, packing), *_join(trees, budget.rows)]


def _cut_unrelated(rows: Iterable[TrainingRow], budget_tokens: int, packing: bool) -> list[Part]:
    """Rows by length, as many in a part as fit: in one line, or padded where that adds little."""
    parts: list[Part] = []
    taken: list[TrainingRow] = []
    total = longest = 0

    def close() -> None:
        most_padded = min(budget_tokens, _MAX_PADDED * total)
        is_packed = packing and len(taken) * longest > most_padded and len(taken) > 1
        parts.append(Part(rows=tuple(taken), shared=(0,) * len(taken) if is_packed else None))

    for row in sorted(rows, key=num_needed):  # stable: equal lengths keep their order
        length = num_needed(row)
        size = total + length if packing else (len(taken) + 1) * length
        if taken and size > budget_tokens:
            close()
            taken, total = [], 0
        taken.append(row)
        total, longest = total + length, length
    if taken:
        close()
    return parts


def _join(trees: Iterable[Tree], budget_tokens: int) -> list[Part]:
    """Trees by size, small ones together in one line."""
    joined: list[list[Tree]] = []
    size = 0
    for tree in sorted(trees, key=lambda tree: tree.num_tokens):
        size += tree.num_tokens
        if joined and size <= budget_tokens:
            joined[-1].append(tree)
        else:
            joined.append([tree])
            size = tree.num_tokens
    return [
        Part(
            rows=tuple(row for tree in trees for row in tree.rows),
            shared=tuple(count for tree in trees for count in tree.shared),
        )
        for trees in joined
    ]


def collate(part: Part | Sequence[TrainingRow], device: torch.device) -> Pass:
    """The tensors of one pass on `device`; bare rows are padded. Masked slots are never read.

    No row at all gives a pass of one token and N = 0, whose loss of 0 still has every parameter in its graph.
    A row without a column "advantages" has its one advantage on each token.
    Raises: TrainerError if the rows do not have the same other columns.
    """
    part = part if isinstance(part, Part) else Part(rows=tuple(part))
    rows = part.rows
    names = {name for row in rows for name in other_columns(row)}
    for row in rows:
        if other_columns(row) != names:
            raise TrainerError(
                f"sample {row.sample_id}: columns {sorted(row.columns)}, its pass has {sorted(names)}"
            )
    trainable = [np.flatnonzero(row.loss_mask) for row in rows]
    counts = [len(indices) for indices in trainable]
    token_ids_BT, position_ids_BT, attention, places = _placed(part, device)

    def per_row(values: list[Any], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)).to(device)

    def joined(pieces: list[Any], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, dtype), *pieces]).astype(dtype)).to(device)

    def column(name: str) -> Tensor:
        return joined([row.columns[name][i] for row, i in zip(rows, trainable, strict=True)], np.float32)

    pairs = list(zip(rows, trainable, strict=True))
    return Pass(
        sample_ids=tuple(row.sample_id for row in rows),
        token_ids_BT=torch.from_numpy(token_ids_BT).to(device),
        position_ids_BT=position_ids_BT,
        attention=attention,
        num_computed=part.num_computed,
        positions_N=joined([path[i - 1] for path, i in zip(places, trainable, strict=True)], np.int64),
        targets_N=joined([row.token_ids[indices] for row, indices in pairs], np.int64),
        behaviour_N=joined([row.logprobs[indices] for row, indices in pairs], np.float32),
        advantages_N=joined([_advantages(row, indices) for row, indices in pairs], np.float32),
        weights_N=per_row([row.weight for row in rows], np.float32),
        temperatures_N=per_row([row.temperature for row in rows], np.float32),
        rows_N=per_row(list(range(len(rows))), np.int64),
        columns_N={name: column(name) for name in sorted(names)},
    )


def other_columns(row: TrainingRow) -> frozenset[str]:
    """The names of the row's columns but "advantages", the one that some rows of a pass may lack."""
    return frozenset(row.columns) - {"advantages"}


def _advantages(row: TrainingRow, indices: Any) -> Any:
    """Those of the row's tokens at `indices`."""
    column = row.columns.get("advantages")
    return np.full(len(indices), row.advantage) if column is None else column[indices]


def _placed(
    part: Part, device: torch.device
) -> tuple[Any, Tensor | None, LineAttention | None, Sequence[Any]]:
    """Token ids [B, T], position ids and attention of a line, and where each row's tokens lie in B·T."""
    lengths = [num_needed(row) for row in part.rows]
    if part.shared is None:
        length = max(lengths, default=1)
        places: Sequence[Any] = [number * length + np.arange(own) for number, own in enumerate(lengths)]
        token_ids_BT = np.zeros((max(1, len(lengths)), length), dtype=np.int64)
    else:
        line = lay_out(lengths, part.shared)
        places = line.paths
        token_ids_BT = np.zeros((1, line.num_tokens), dtype=np.int64)
    for row, path in zip(part.rows, places, strict=True):
        token_ids_BT.reshape(-1)[path] = row.token_ids[: len(path)]
    if part.shared is None:
        return token_ids_BT, None, None, places
    depths_1T = torch.from_numpy(line.depths_T[None]).to(device)
    return token_ids_BT, depths_1T, line_attention(line, device), places


def hidden_states(model: Any, batch: Pass) -> Tensor:
    """The hidden states that predict the trainable tokens, [N, H], with the graph.

    `model` is Hugging Face's causal language model (adapters may be injected into it).
    Raises: TrainerError for a line through a model with sliding windows.
    """
    options: dict[str, Any] = {}
    if batch.attention is not None:
        use_forest_attention(model)
        options = {"position_ids": batch.position_ids_BT, "line": batch.attention}
    output = model.base_model(input_ids=batch.token_ids_BT, use_cache=False, **options)
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden.index_select(0, batch.positions_N)
