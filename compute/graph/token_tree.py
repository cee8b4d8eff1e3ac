"""The token paths of one policy in one episode attempt: every token is kept once.

A call's prompt that continues a known path stores only what is new; one that leaves it, also in the middle of
a segment, begins a branch there. Nothing is masked and nothing is matched by text. Equal paths that were
sampled twice stay two segments, since each sampled token has a log-probability of its own.
Used when an episode is recorded; the records are `SegmentRecord`s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """Where ids leave the known paths: after the first `start` tokens of the path of segment `parent`.

    Without a known beginning `parent` is None and `start` 0. `is_known` says that the ids are the whole path
    of `parent`, so that no segment is needed for them.
    """

    parent: str | None
    start: int
    new_ids: tuple[int, ...]
    is_known: bool


@dataclass(kw_only=True, slots=True)
class _Segment:
    segment_id: str
    start: int
    ids: tuple[int, ...]
    parent: _Segment | None
    # By where a child leaves the path and its first token there; more than one where samples are equal.
    children: dict[tuple[int, int], list[_Segment]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class TokenTree:
    """Grows by `add`; `attach` only looks. Cost: the length of the ids, times equal siblings."""

    def __init__(self) -> None:
        self._roots: dict[tuple[int, int], list[_Segment]] = {}
        self._segments: dict[str, _Segment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def num_tokens(self) -> int:
        """Tokens kept, over all segments."""
        return sum(len(segment.ids) for segment in self._segments.values())

    def attach(self, ids: Sequence[int], prefer: Collection[str] = ()) -> Attached:
        """The deepest known beginning of `ids`; among equal ones that through segments of `prefer`."""
        ids = tuple(ids)
        best: tuple[int, int, _Segment | None] = (0, 0, None)  # matched tokens, preferred segments on the way
        frontier = [(segment, 0) for segment in self._roots.get((0, ids[0]), ())] if ids else []
        while frontier:
            segment, liked = frontier.pop()
            liked += segment.segment_id in prefer
            matched = segment.start + _common(segment.ids, ids, segment.start)
            if best[2] is None or (matched, liked) > best[:2]:
                best = (matched, liked, segment)
            if matched < len(ids):
                frontier += [
                    (child, liked) for child in reversed(segment.children.get((matched, ids[matched]), ()))
                ]
        start, _, parent = best
        return Attached(
            parent=parent.segment_id if parent else None,
            start=start,
            new_ids=ids[start:],
            is_known=parent is not None and start == len(ids) == parent.end,
        )

    def add(self, segment_id: str, attached: Attached) -> None:
        """Keeps the new tokens of `attached` as a segment.

        Raises: ValueError for a known segment id; KeyError for an unknown parent.
        """
        self._add(segment_id, attached.parent, attached.start, attached.new_ids)

    def extend(self, segment_id: str, parent: str, ids: Sequence[int]) -> int:
        """Keeps sampled `ids` as a segment at the end of the path of `parent`; returns where it starts."""
        start = self._segments[parent].end
        self._add(segment_id, parent, start, tuple(ids))
        return start

    def on_path(self, segment_id: str | None, start: int) -> list[str]:
        """The segments that lie wholly within the first `start` tokens of the path, the nearest first."""
        segment = self._segments[segment_id] if segment_id is not None else None
        found = []
        while segment is not None:
            if segment.end <= start:
                found.append(segment.segment_id)
            start = min(start, segment.start)
            segment = segment.parent
        return found

    def _add(self, segment_id: str, parent_id: str | None, start: int, ids: tuple[int, ...]) -> None:
        if segment_id in self._segments:
            raise ValueError(f"segment {segment_id} is in the tree already")
        parent = self._segments[parent_id] if parent_id is not None else None
        segment = _Segment(segment_id=segment_id, start=start, ids=ids, parent=parent)
        self._segments[segment_id] = segment
        if not ids:
            return  # it only names an end inside its parent; what follows it leaves the parent there
        while parent is not None and not parent.ids:
            parent = parent.parent
        children = self._roots if parent is None else parent.children
        children.setdefault((start, ids[0]), []).append(segment)


def _common(own: tuple[int, ...], ids: tuple[int, ...], at: int) -> int:
    """How many leading tokens of `own` stand in `ids` from position `at`."""
    high = min(len(own), len(ids) - at)
    if own[:high] == ids[at : at + high]:
        return high
    low = 0  # own[:low] matches, own[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if own[low:middle] == ids[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low
