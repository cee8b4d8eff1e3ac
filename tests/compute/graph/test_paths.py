"""Paths of tokens: the beginning of the parent's path, then the own tokens; broken ones are named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.graph.paths import BrokenPath, path_pieces, path_tokens
from megloom.compute.graph.records import SegmentRecord


def segment(name: str, token_ids: list[int], **overrides: Any) -> SegmentRecord:
    values: dict[str, Any] = {"parent": None, "start": 0, "sampled": False, "logprobs": None}
    values |= {"episode_id": "e", "run": "r", "step": 1, "policy": "p", "version_spans": None}
    return SegmentRecord(**(values | {"segment_id": name, "token_ids": token_ids} | overrides))


def index(*segments: SegmentRecord) -> dict[str, SegmentRecord]:
    return {each.segment_id: each for each in segments}


def test_a_path_is_the_prompt_then_the_answer() -> None:
    segments = index(segment("p", [1, 2, 3]), segment("c", [4, 5], parent="p", start=3))
    assert path_tokens(segments, "c") == [1, 2, 3, 4, 5]
    assert path_tokens(segments, "p") == [1, 2, 3]


def test_a_branch_in_the_middle_of_a_segment_takes_only_its_beginning() -> None:
    segments = index(
        segment("p", [1, 2, 3]),
        segment("c", [4, 5, 6], parent="p", start=3),
        segment("q", [9], parent="c", start=4),
    )
    assert path_tokens(segments, "q") == [1, 2, 3, 4, 9]
    assert [(piece.segment.segment_id, piece.num_tokens) for piece in path_pieces(segments, "q")] == [
        ("p", 3),
        ("c", 1),
        ("q", 1),
    ]


def test_a_branch_before_its_parents_own_tokens_takes_none_of_them() -> None:
    segments = index(
        segment("p", [1, 2, 3]),
        segment("c", [4, 5], parent="p", start=3),
        segment("q", [9], parent="c", start=2),
        segment("end", [], parent="c", start=0),
    )
    assert path_tokens(segments, "q") == [1, 2, 9]
    assert path_tokens(segments, "end") == []


def test_a_path_of_ten_thousand_segments_is_resolved() -> None:
    chain = [segment("s0", [0])]
    chain += [segment(f"s{n}", [n], parent=f"s{n - 1}", start=n) for n in range(1, 10_000)]
    assert path_tokens(index(*chain), "s9999") == list(range(10_000))


def test_a_missing_parent_is_named_with_the_leaf() -> None:
    with pytest.raises(BrokenPath, match="path of segment c: segment p is not among the 1 read"):
        path_tokens(index(segment("c", [4], parent="p", start=3)), "c")


def test_a_cycle_is_named_instead_of_followed() -> None:
    segments = index(segment("a", [1], parent="b", start=1), segment("b", [1], parent="a", start=1))
    with pytest.raises(BrokenPath, match="path of segment a: segment a follows itself"):
        path_tokens(segments, "a")


def test_a_parent_that_is_too_short_is_named_with_both_lengths() -> None:
    segments = index(segment("p", [1, 2]), segment("c", [4], parent="p", start=3))
    with pytest.raises(BrokenPath, match="takes 3 tokens of segment p, whose path has 2"):
        path_tokens(segments, "c")


def test_a_first_segment_that_does_not_start_at_zero_is_refused() -> None:
    with pytest.raises(BrokenPath, match="segment p starts at 1 of no parent"):
        path_tokens(index(segment("p", [1], start=1)), "p")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.lists(st.integers(0, 9), max_size=4))))
def test_random_trees_give_what_copying_whole_paths_gives(
    grown: list[tuple[int, int, list[int]]],
) -> None:
    segments, paths = {"s0": segment("s0", [7, 7])}, {"s0": [7, 7]}
    for parent_draw, start_draw, own in grown:
        parent = f"s{parent_draw % len(segments)}"
        start = start_draw % (len(paths[parent]) + 1)
        name = f"s{len(segments)}"
        segments[name] = segment(name, own, parent=parent, start=start)
        paths[name] = paths[parent][:start] + own
    assert {name: path_tokens(segments, name) for name in segments} == paths
