"""The token tree: every token once, exact paths, branches where ids leave what is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.paths import path_tokens
from megloom.compute.graph.records import EdgeKind, SegmentRecord
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.token_paths import TokenPaths, completion_segment_id
from megloom.compute.graph.token_tree import Attached, TokenTree


def call(index: int, prompt: tuple[int, ...], answer: tuple[int, ...], **overrides: Any) -> Vertex:
    values: dict[str, Any] = {
        "invocation_id": f"e-a0-i{index:03d}",
        "episode_id": "e",
        "agent": "solver",
        "policy": "solver",
        "index": index,
        "parents": (),
        "registered_s": 0.0,
        "seed": 0,
        "temperature": 1.0,
        "max_tokens": 8,
        "state": InvocationState.DONE,
        "prompt_ids": prompt,
        "token_ids": answer,
        "logprobs": (-0.5,) * len(answer),
        "version_spans": ((3, 0, len(answer)),),
    }
    return Vertex(**(values | overrides))


def paths_of(*calls: Vertex) -> TokenPaths:
    paths = TokenPaths(run="r", step=1)
    for vertex in calls:
        paths.add(vertex)
    return paths


def segments_of(paths: TokenPaths) -> dict[str, SegmentRecord]:
    return {segment.segment_id: segment for segment in paths.segments}


def test_sixty_turns_of_a_growing_conversation_store_each_token_once() -> None:
    calls, said = [], (1, 2, 3)
    for turn in range(60):
        answer = (100 + turn, 200 + turn, 9)
        calls.append(call(turn, said, answer))
        said = said + answer + (300 + turn,)
    paths = paths_of(*calls)
    stored = sum(len(segment.token_ids) for segment in paths.segments)
    assert stored == len(said) - 1  # what the user said after the last answer was never sent
    assert paths.extends == [(f"e-a0-i{n:03d}", f"e-a0-i{n + 1:03d}") for n in range(59)]
    last = segments_of(paths)[completion_segment_id("e-a0-i059")]
    assert tuple(path_tokens(segments_of(paths), last.segment_id)) == said[:-1]


def test_equal_prompts_share_their_segment_and_their_answers_stay_apart() -> None:
    paths = paths_of(*(call(n, (1, 2, 3), (7, 8)) for n in range(3)))
    assert [segment.sampled for segment in paths.segments] == [False, True, True, True]
    assert {paths.prompt_segment(f"e-a0-i{n:03d}") for n in range(3)} == {"e-a0-i000-p"}
    assert paths.extends == []


def test_a_prompt_that_leaves_a_segment_in_its_middle_begins_a_branch_there() -> None:
    paths = paths_of(call(0, (1, 2, 3, 4), (9,)), call(1, (1, 2, 5), (8,)))
    branch = segments_of(paths)["e-a0-i001-p"]
    assert (branch.parent, branch.start, branch.token_ids) == ("e-a0-i000-p", 2, [5])
    assert path_tokens(segments_of(paths), "e-a0-i001-c") == [1, 2, 5, 8]
    assert paths.extends == []


def test_a_prompt_that_ends_inside_a_known_segment_needs_no_tokens() -> None:
    paths = paths_of(call(0, (1, 2, 3, 4), (9,)), call(1, (1, 2), (8,)))
    assert segments_of(paths)["e-a0-i001-p"].token_ids == []
    assert path_tokens(segments_of(paths), "e-a0-i001-p") == [1, 2]
    assert path_tokens(segments_of(paths), "e-a0-i001-c") == [1, 2, 8]


def test_a_prompt_that_changes_the_answer_before_it_does_not_extend_it() -> None:
    paths = paths_of(call(0, (1, 2), (7, 8, 9)), call(1, (1, 2, 7, 8, 5), (4,)))
    assert paths.extends == []
    assert path_tokens(segments_of(paths), "e-a0-i001-p") == [1, 2, 7, 8, 5]


def test_of_equal_answers_the_one_that_the_call_depends_on_is_continued() -> None:
    parent = (("e-a0-i001", EdgeKind.DATA),)
    paths = paths_of(
        call(0, (1, 2), (7,)), call(1, (1, 2), (7,)), call(2, (1, 2, 7, 3), (4,), parents=parent)
    )
    assert paths.extends == [("e-a0-i001", "e-a0-i002")]


def test_policies_have_trees_of_their_own() -> None:
    paths = paths_of(call(0, (1, 2), (7,)), call(1, (1, 2), (7,), policy="verifier"))
    assert [segment.parent for segment in paths.segments] == [None, "e-a0-i000-p", None, "e-a0-i001-p"]


def test_a_call_that_never_ran_leaves_its_prompt_and_no_answer() -> None:
    waiting = call(0, (1, 2), (), state=InvocationState.CANCELLED)
    blocked = call(1, (), (), state=InvocationState.CANCELLED, prompt_ids=None)
    paths = paths_of(waiting, blocked)
    assert [segment.segment_id for segment in paths.segments] == ["e-a0-i000-p"]
    assert paths.prompt_segment("e-a0-i001") is None


def test_a_segment_is_added_once() -> None:
    tree = TokenTree()
    attached = tree.attach((1, 2))
    assert attached == Attached(parent=None, start=0, new_ids=(1, 2), is_known=False)
    tree.add("s", attached)
    with pytest.raises(ValueError, match="segment s is in the tree"):
        tree.add("s", attached)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.booleans()), max_size=12))
def test_paths_are_exact_and_no_prompt_token_is_stored_twice(prompts: list[tuple[list[int], bool]]) -> None:
    calls = []
    for index, (ids, continues) in enumerate(prompts):
        before = calls[-1].prompt_ids + calls[-1].token_ids if continues and calls else ()
        calls.append(call(index, (*before, *ids), (index + 10, index % 3)))
    paths = paths_of(*calls)
    segments = segments_of(paths)
    for vertex in calls:
        prompt = paths.prompt_segment(vertex.invocation_id)
        assert prompt is not None and tuple(path_tokens(segments, prompt)) == vertex.prompt_ids
        answer = path_tokens(segments, completion_segment_id(vertex.invocation_id))
        assert tuple(answer) == vertex.prompt_ids + vertex.token_ids
    known: set[tuple[int, ...]] = set()  # every prefix that some path has: a trie, the slow way
    new = 0
    for vertex in calls:
        for end in range(1, len(vertex.prompt_ids) + 1):
            new += vertex.prompt_ids[:end] not in known
            known.add(vertex.prompt_ids[:end])
        whole = vertex.prompt_ids + vertex.token_ids
        known.update(whole[:end] for end in range(len(vertex.prompt_ids) + 1, len(whole) + 1))
    stored = sum(len(segment.token_ids) for segment in paths.segments if not segment.sampled)
    assert stored == new
