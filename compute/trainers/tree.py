"""Rows that share prefixes: their order, the trees that they form, and the cut of a tree under a budget.

In lexicographic order of token ids, rows with a common prefix are neighbours, and what a row adds to those
before it is all but the prefix shared with its direct neighbour. So neighbours form a sub-forest with
Σ length − Σ shared tokens, and cutting between two of them repeats just the tokens that they share.
Every choice depends on the rows alone. No torch here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megloom.compute.trainers.protocol import TrainingRow


def num_needed(row: TrainingRow) -> int:
    """The tokens that must go through the model: those before the last trainable one, at least one."""
    trainable = np.flatnonzero(row.loss_mask)
    return max(1, int(trainable[-1])) if len(trainable) else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Rows in prefix order; row i shares its first `shared[i]` needed tokens with row i − 1, row 0 none."""

    rows: tuple[TrainingRow, ...]
    shared: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(num_needed(row) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """The tokens to compute, each shared one once."""
        return sum(self.lengths) - sum(self.shared)


def find_trees(rows: Sequence[TrainingRow], *, min_saved: float) -> list[Tree]:
    """All rows as trees; a neighbour joins if it finds at least `min_saved` of its tokens there already.

    What matters is the tokens, so the prompt that a group's episodes begin with is shared like the past of
    an episode's branches.
    """
    ordered = by_prefix(rows)
    if not ordered:
        return []
    shared = [0, *(_num_shared(one, other) for one, other in itertools.pairwise(ordered))]
    starts = [i for i, row in enumerate(ordered) if shared[i] < max(1.0, min_saved * num_needed(row))]
    stops = [*starts[1:], len(ordered)]
    return [_slice(ordered, shared, start, stop) for start, stop in zip(starts, stops, strict=True)]


def by_prefix(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The rows in lexicographic order of their needed token ids; equal ones keep their order."""

    def key(row: TrainingRow) -> bytes:  # big-endian, so that the order of the bytes is that of the ids
        return row.token_ids[: num_needed(row)].astype(">u4").tobytes()

    return sorted(rows, key=key)


def split(tree: Tree, budget_tokens: int) -> list[Tree]:
    """The tree in runs of neighbours of at most `budget_tokens` each, with as few tokens repeated as can be,
    and then as few runs. A row above the budget is a run of its own.
    """
    if tree.num_tokens <= budget_tokens:
        return [tree]
    lengths, count = tree.lengths, len(tree.rows)
    best: list[tuple[int, int]] = [(0, 0)]  # tokens, runs of the rows up to here
    start_of: list[int] = [0]
    for stop in range(1, count + 1):
        choices: list[tuple[int, int, int]] = []
        own = 0  # the tokens of rows start+1 … stop−1 that row start does not have
        for start in range(stop - 1, -1, -1):
            size = own + lengths[start]
            if size > budget_tokens and start < stop - 1:
                break  # a run only grows to the left
            tokens, runs = best[start]
            choices.append((tokens + size, runs + 1, start))
            own += lengths[start] - tree.shared[start]
        tokens, runs, start = min(choices)
        best.append((tokens, runs))
        start_of.append(start)
    runs_found: list[Tree] = []
    stop = count
    while stop > 0:
        runs_found.append(_slice(tree.rows, tree.shared, start_of[stop], stop))
        stop = start_of[stop]
    return runs_found[::-1]


def _slice(rows: Sequence[TrainingRow], shared: Sequence[int], start: int, stop: int) -> Tree:
    return Tree(rows=tuple(rows[start:stop]), shared=(0, *shared[start + 1 : stop]))


def _num_shared(one: TrainingRow, other: TrainingRow) -> int:
    length = min(num_needed(one), num_needed(other))
    differ = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
    return int(differ[0]) if len(differ) else length
