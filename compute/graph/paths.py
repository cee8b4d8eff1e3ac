"""Token paths: a leaf segment resolved to the tokens from the path's beginning.

The path of a segment is the first `start` tokens of its parent's path, then its own tokens
(`records.SegmentRecord`). Called by exports and by the conductor; a chain may be thousands of segments long,
so nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megloom.compute.graph.records import SegmentRecord


class BrokenPath(ValueError):
    """The segments do not give the path: one is missing, is too short, or follows itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The first `num_tokens` own tokens of `segment`: what it gives to a path."""

    segment: SegmentRecord
    num_tokens: int


def path_pieces(segments: Mapping[str, SegmentRecord], leaf: str) -> list[Piece]:
    """The pieces of the leaf's path in order; those that give no token are left out.

    Raises: BrokenPath naming the leaf and the segment at fault.
    """
    pieces: list[Piece] = []
    seen: set[str] = set()
    at: str | None = leaf
    wanted: int | None = None  # tokens of the path of `at` that its child continues; None for all
    while at is not None:
        if at in seen:
            raise BrokenPath(f"path of segment {leaf}: segment {at} follows itself")
        seen.add(at)
        segment = segments.get(at)
        if segment is None:
            raise BrokenPath(f"path of segment {leaf}: segment {at} is not among the {len(segments)} read")
        _check_length(leaf, segment, wanted)
        num_tokens = len(segment.token_ids) if wanted is None else max(0, wanted - segment.start)
        if num_tokens:
            pieces.append(Piece(segment=segment, num_tokens=num_tokens))
        wanted = segment.start if wanted is None else min(wanted, segment.start)
        at = segment.parent
    return pieces[::-1]


def path_tokens(segments: Mapping[str, SegmentRecord], leaf: str) -> list[int]:
    """The token ids of the leaf's path.

    Raises: BrokenPath naming the leaf and the segment at fault.
    """
    token_ids: list[int] = []
    for piece in path_pieces(segments, leaf):
        token_ids += piece.segment.token_ids[: piece.num_tokens]
    return token_ids


def _check_length(leaf: str, segment: SegmentRecord, wanted: int | None) -> None:
    """A path must be as long as its child says, and without a parent there is nothing to start from."""
    end = segment.start + len(segment.token_ids)
    if segment.start < 0 or (segment.parent is None and segment.start > 0):
        raise BrokenPath(
            f"path of segment {leaf}: segment {segment.segment_id} starts at {segment.start}"
            f" of {segment.parent or 'no parent'}"
        )
    if wanted is not None and wanted > end:
        raise BrokenPath(
            f"path of segment {leaf}: its child takes {wanted} tokens of segment {segment.segment_id},"
            f" whose path has {end}"
        )
