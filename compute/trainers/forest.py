"""Rows in one line: every row is computed from the token on at which it leaves the row before it.

Rows in prefix order (`tree.by_prefix`) are the leaves of a forest, walked in depth-first order. The line
holds its tokens in that order, each once, so a token's descendants follow it up to its *end*:

    rows  abcd, abce, abf, xy     line  a b c d e f x y
                                  depth 0 1 2 3 3 2 0 1     = the token's position in its row
                                  end   6 6 5 4 5 6 8 8     token q attends to token k if k <= q < end[k]

Rows that share nothing, a packed line, are the same structure with trees of one row each.
Attention never needs the whole [T, T] mask: blocks of rows attend to the tokens of their common past and to
themselves. Shapes: T = tokens of the line, Q = queries of a block, K = its keys. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Short rows share a block with a dense mask: below some hundred queries a call costs more than its numbers.
_BLOCK_TOKENS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Queries [start, stop) of the line, and the ranges of their keys in order; the last one is their own.

    `is_causal` marks one row without a past: a causal mask is all that it needs.
    """

    start: int
    stop: int
    key_ranges: tuple[tuple[int, int], ...]
    is_causal: bool

    @property
    def keys_K(self) -> Ints:
        return np.concatenate([np.arange(start, stop) for start, stop in self.key_ranges])


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """`paths` has the place of each row's tokens in the line, in the order of the rows."""

    num_tokens: int
    paths: tuple[Ints, ...]
    depths_T: Ints
    ends_T: Ints
    blocks: tuple[Block, ...]

    def is_visible_QK(self, block: Block) -> npt.NDArray[np.bool_]:
        """Which of the block's keys each of its queries may see."""
        queries_Q1, keys_K = np.arange(block.start, block.stop)[:, None], block.keys_K
        return (keys_K <= queries_Q1) & (queries_Q1 < self.ends_T[keys_K])


def lay_out(lengths: Sequence[int], shared: Sequence[int]) -> Line:
    """The line of rows with `lengths` tokens, the first `shared[i]` of which are those of row i − 1."""
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths) - np.array(shared))]).astype(np.int64)
    num_tokens = int(offsets[-1])
    paths: list[Ints] = []
    ends_T = np.full(num_tokens, num_tokens, dtype=np.int64)
    depths_T = np.empty(num_tokens, dtype=np.int64)
    for number, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        own = np.arange(offsets[number], offsets[number + 1])
        past = paths[-1][:common] if paths else own[:0]
        assert len(past) == common <= length, "a row cannot share more than there is"
        if paths:
            ends_T[paths[-1][common:]] = offsets[number]
        depths_T[own] = np.arange(common, length)
        paths.append(np.concatenate([past, own]))
    return Line(
        num_tokens=num_tokens,
        paths=tuple(paths),
        depths_T=depths_T,
        ends_T=ends_T,
        blocks=tuple(_blocks(paths, shared, offsets)),
    )


def _blocks(paths: Sequence[Ints], shared: Sequence[int], offsets: Ints) -> list[Block]:
    """Neighbouring rows, joined while they are short. The past of the first holds that of the others."""
    blocks: list[Block] = []
    first = 0
    for after in range(1, len(paths) + 1):
        if after < len(paths) and offsets[after + 1] - offsets[first] <= _BLOCK_TOKENS:
            continue
        start, stop = int(offsets[first]), int(offsets[after])
        if start < stop:  # a row that repeats the one before it has no tokens of its own
            past = _ranges(paths[first][: shared[first]])
            blocks.append(
                Block(
                    start=start,
                    stop=stop,
                    key_ranges=(*past, (start, stop)),
                    is_causal=not past and after == first + 1,
                )
            )
        first = after
    return blocks


def _ranges(places: Ints) -> list[tuple[int, int]]:
    """Ascending places as ranges [start, stop)."""
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks)]
