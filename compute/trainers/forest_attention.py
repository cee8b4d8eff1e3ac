"""Attention over a line of rows (`forest.Line`) inside Hugging Face's models.

The models call it through their attention interface, under the name "megloom_forest": a pass over a line
hands a `LineAttention` down as a keyword, any other pass goes to torch's SDPA as without us. On a CPU every
block attends to its own keys and nothing else, so that neither [T, T] scores nor work for pairs that cannot
see each other arise; on CUDA FlexAttention skips the tiles that nothing may see.
Shapes: h = heads, T = tokens of the line, d = numbers per head, Q and K = queries and keys of a block.
"""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from megloom.compute.trainers.forest import Line
from megloom.compute.trainers.protocol import TrainerError

NAME = "megloom_forest"


@dataclass(frozen=True, kw_only=True, slots=True)
class LineAttention:
    """What the attention of one line needs, made once for all layers.

    Either `flex` is set, or the line is split in pieces of `piece_sizes`, of which `keys` names those that a
    block of `query_sizes` queries may see; `biases` are added to its scores, None stands for a causal mask.
    """

    query_sizes: tuple[int, ...] = ()
    piece_sizes: tuple[int, ...] = ()
    keys: tuple[tuple[int, ...], ...] = ()
    biases: tuple[Tensor | None, ...] = ()
    flex: BlockMask | None = None


def line_attention(line: Line, device: torch.device) -> LineAttention:
    """FlexAttention on CUDA, unless compilation is turned off for the process; else blocks."""
    if device.type == "cuda" and os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        return LineAttention(flex=flex_mask(line, device, compiles=True))
    return in_blocks(line, device)


def in_blocks(line: Line, device: torch.device) -> LineAttention:
    """Each block apart, by SDPA: the line is cut wherever the keys of some block begin or end."""
    bounds = {place for block in line.blocks for bounds in block.key_ranges for place in bounds}
    edges = sorted(bounds)
    number = {place: i for i, place in enumerate(edges)}

    def bias(index: int) -> Tensor | None:
        if line.blocks[index].is_causal:
            return None
        is_visible = line.is_visible_QK(line.blocks[index])
        return torch.from_numpy(np.where(is_visible, np.float32(0), np.float32(-np.inf))).to(device)

    return LineAttention(
        query_sizes=tuple(block.stop - block.start for block in line.blocks),
        piece_sizes=tuple(stop - start for start, stop in itertools.pairwise(edges)),
        keys=tuple(
            tuple(piece for start, stop in block.key_ranges for piece in range(number[start], number[stop]))
            for block in line.blocks
        ),
        biases=tuple(bias(index) for index in range(len(line.blocks))),
    )


def flex_mask(line: Line, device: torch.device, *, compiles: bool) -> BlockMask:
    """Key k is visible to query q if k ≤ q < end of k; tiles of 128 × 128 without such a pair are skipped."""
    ends_T = torch.from_numpy(line.ends_T).to(device)

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_T[key])

    size = line.num_tokens
    return create_block_mask(is_visible, None, None, size, size, device=device, _compile=compiles)


def use_forest_attention(model: Any) -> None:
    """Makes the model's layers ask this module for their attention. Passes that are no line stay as they are.

    Raises: TrainerError if layers attend to a sliding window, which a line does not know.
    """
    if model.config._attn_implementation != NAME:
        if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
            raise TrainerError(
                "packed rows and shared prefixes need full attention, the model has sliding windows: "
                "set the trainer's packing and shared_prefixes to false"
            )
        model.set_attn_implementation(NAME)


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    line: LineAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer: query [1, h, T, d] to [1, T, h, d]; key and value may have fewer heads."""
    if line is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if line.flex is not None:
        output = _flex(query.device.type)(
            query, key, value, block_mask=line.flex, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None
    keys, values = key.split(line.piece_sizes, dim=2), value.split(line.piece_sizes, dim=2)
    outputs = [
        scaled_dot_product_attention(
            queries,
            _joined(keys, pieces),
            _joined(values, pieces),
            attn_mask=bias if bias is None else bias.to(query.dtype),
            is_causal=bias is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for queries, pieces, bias in zip(
            query.split(line.query_sizes, dim=2), line.keys, line.biases, strict=True
        )
    ]
    return torch.cat(outputs, dim=1), None


def _joined(pieces: tuple[Tensor, ...], chosen: tuple[int, ...]) -> Tensor:
    if len(chosen) == 1:
        return pieces[chosen[0]]
    return torch.cat([pieces[piece] for piece in chosen], dim=2)


@functools.cache
def _flex(device: str) -> Any:
    """FlexAttention, compiled on CUDA: uncompiled it makes all [T, T] scores."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


AttentionInterface.register(NAME, _forward)
