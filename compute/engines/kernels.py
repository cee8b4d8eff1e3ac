"""The decode loop as machine code, for models whose operators are too small for torch.

Follows `model.py` and `sampling.py` step by step and draws by the same rule. The new tokens of all requests
form one list without padding; at most `CHUNK` of them go through the layers at a time, so that what lies
between two operations stays in the processor's nearest caches. Each token's arithmetic is the same whatever
stands beside it: equal requests give equal bits in any batch. Called by `compiled.py` only.
Shapes as in `layers.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from megloom.compute.engines.draws import draw, uniform_number
from megloom.compute.engines.layers import (
    BLOCK,
    CHUNK,
    Cache,
    KernelModel,
    Scratch,
    attend,
    gate,
    normalise,
    normalise_rows,
    project,
    write_heads,
)


class RowColumns(NamedTuple):
    """What the sampler knows of each row. `temperatures` 0 means greedy; `stop_ids` are padded with -1."""

    seeds: np.ndarray  # [B] uint64
    temperatures: np.ndarray  # [B] float32
    stop_ids: np.ndarray  # [B, most stop ids of a row] int64
    left: np.ndarray  # [B] int64, tokens that may still be sampled


@njit
def _whole_blocks(num_rows: int) -> int:
    return (num_rows + BLOCK - 1) // BLOCK * BLOCK


@njit
def _forward_chunk(
    model: KernelModel,
    scratch: Scratch,
    cache: Cache,
    tokens: Any,
    slots: Any,
    positions: Any,
    wanted: Any,
    start: int,
) -> None:
    """Takes up to CHUNK new tokens through all layers; leaves the hidden states of `wanted` in the scratch.

    `wanted` counts from `start` before the first token. Of the others only keys and values are needed, so
    they leave the last layer early. Rows behind the tokens, up to whole blocks, hold leftovers that no token
    reads.
    """
    num_layers, hidden = model.attention_norm.shape[0], scratch.hidden
    for row in range(len(tokens)):
        for i in range(hidden.shape[1]):
            hidden[row, i] = model.embedding[tokens[row], i]
    for layer in range(num_layers):
        num_rows = _whole_blocks(len(tokens))
        normalise_rows(model, scratch, model.attention_norm, layer, num_rows)
        project(scratch.normed, model.qkv, layer, scratch.qkv, num_rows, False)
        write_heads(model, scratch, layer, cache, slots, positions)
        if layer < num_layers - 1:
            attend(model, scratch, layer, cache, slots, positions, scratch.order[: len(tokens)], 0)
        else:
            num_rows = _whole_blocks(len(wanted))
            for row in range(len(wanted)):
                for i in range(hidden.shape[1]):
                    hidden[row, i] = hidden[wanted[row] - start, i]
            attend(model, scratch, layer, cache, slots, positions, wanted, start)
        project(scratch.mixed, model.output, layer, hidden, num_rows, True)
        normalise_rows(model, scratch, model.mlp_norm, layer, num_rows)
        project(scratch.normed, model.gate_up, layer, scratch.gate_up, num_rows, False)
        gate(scratch.gate_up, scratch.active, num_rows)
        project(scratch.active, model.down, layer, hidden, num_rows, True)


@njit
def _forward(
    model: KernelModel, scratch: Scratch, cache: Cache, tokens: Any, slots: Any, positions: Any, last: Any
) -> None:
    """Writes keys and values of the new tokens, and the logits behind each row's last token."""
    size = model.embedding.shape[1]
    done = 0
    for start in range(0, len(tokens), CHUNK):
        end, first = min(start + CHUNK, len(tokens)), done
        while done < len(last) and last[done] < end:
            done += 1
        wanted = last[first:done]
        _forward_chunk(
            model, scratch, cache, tokens[start:end], slots[start:end], positions[start:end], wanted, start
        )
        for row in range(len(wanted)):
            to = (first + row) * size
            normalise(scratch.hidden, row * size, model.final_norm, 0, size, model.eps, scratch.ends, to)
    project(scratch.ends, model.head, 0, scratch.logits, _whole_blocks(len(last)), False)


@njit
def _ends(stop_ids: Any, left: Any, row: int, token: int, count: int) -> bool:
    """Returns whether a row ends with a token, its `count`-th of this call."""
    for i in range(stop_ids.shape[1]):
        if token == stop_ids[row, i]:
            return True
    return count >= left[row]


@njit
def _sample(
    model: KernelModel,
    scratch: Scratch,
    num_rows: int,
    columns: RowColumns,
    step: int,
    sampled: Any,
    logprobs: Any,
    counts: Any,
) -> int:
    """Draws a token for each live row, writes it to its column, returns how many rows live on, in order."""
    live, num_left = scratch.live, 0
    for i in range(num_rows):
        row, position = live[0, i], live[2, i]
        uniform = uniform_number(columns.seeds[row], position)
        token = draw(
            scratch.logits,
            i,
            model.embedding.shape[0],
            columns.temperatures[row],
            uniform,
            scratch.logprobs,
            scratch.probabilities,
        )
        sampled[row, step], logprobs[row, step], counts[row] = token, scratch.logprobs[token], step + 1
        if not _ends(columns.stop_ids, columns.left, row, token, step + 1):
            live[0, num_left], live[1, num_left] = row, live[1, i]
            live[2, num_left], live[3, num_left] = position, token
            num_left += 1
    return num_left


@njit
def generate(
    model: KernelModel,
    scratch: Scratch,
    cache: Cache,
    tokens: Any,
    slots: Any,
    positions: Any,
    last: Any,
    columns: RowColumns,
    sampled: Any,
    logprobs: Any,
    counts: Any,
) -> None:
    """Samples up to `steps` tokens for each row, no further than to its end.

    `tokens`, `slots`, `positions` `[N]`: the first step's new tokens, rows one after the other, positions
    rising. `last` `[B]`: the indices of the rows' last tokens, rising. Writes `sampled` and `logprobs`
    `[B, steps]`, how many of them hold in `counts` `[B]`, and keys and values of all but the last sampled
    tokens. Leaves the last step's logits in the scratch.
    """
    num_steps = sampled.shape[1]
    live = scratch.live
    num_rows = len(last)
    for row in range(num_rows):
        live[0, row], live[1, row], live[2, row] = row, slots[last[row]], positions[last[row]] + 1
    _forward(model, scratch, cache, tokens, slots, positions, last)
    for step in range(num_steps):
        num_rows = _sample(model, scratch, num_rows, columns, step, sampled, logprobs, counts)
        if num_rows == 0 or step + 1 == num_steps:
            return
        order = scratch.order[:num_rows]
        _forward(model, scratch, cache, live[3, :num_rows], live[1, :num_rows], live[2, :num_rows], order)
        for i in range(num_rows):
            live[2, i] += 1
