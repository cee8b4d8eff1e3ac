"""Drawing training paths: every sampled token has one owner, the draw is bounded, seeds replay it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.records import EdgeKind
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.training_view import Candidate
from megloom.compute.rollout.samples import DrawnPath, draw_paths

SYSTEM_A, SYSTEM_B = (1, 2), (1, 3)


def call(
    index: int,
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
    *,
    reward: float | None = 1.0,
    **overrides: Any,
) -> Candidate:
    """A finished call whose tokens each have a log-probability of their own, which names them."""
    values: dict[str, Any] = {
        "invocation_id": f"e-a0-i{index:03d}",
        "episode_id": "e",
        "agent": "coder",
        "policy": "coder",
        "index": index,
        "parents": (),
        "registered_s": 0.0,
        "seed": 0,
        "temperature": 1.0,
        "max_tokens": 99,
        "state": InvocationState.DONE,
        "prompt_ids": prompt,
        "token_ids": answer,
        "logprobs": tuple(-float(100 * index + place + 1) for place in range(len(answer))),
        "version_spans": ((3, 0, len(answer)),),
    }
    vertex = Vertex(**(values | overrides))
    return Candidate(vertex=vertex, member=0, reward=reward)


def ids(vertex: Vertex) -> tuple[int, ...]:
    assert vertex.prompt_ids is not None
    return vertex.prompt_ids + vertex.token_ids


def then(call_before: Candidate, *new: int) -> tuple[int, ...]:
    """The prompt that continues a call's answer."""
    return ids(call_before.vertex) + new


def emitted(paths: list[DrawnPath]) -> list[float]:
    """The log-probabilities of every trainable token, which name the tokens."""
    return [float(value) for path in paths for value in path.logprobs[path.loss_mask == 1]]


def names(paths: list[DrawnPath]) -> list[str]:
    return [path.leaf_invocation[-1] for path in paths]


def test_a_conversation_is_one_path_that_owns_every_answer() -> None:
    first = call(0, (1, 2), (5, 6))
    second = call(1, then(first, 9), (7,), version_spans=((4, 0, 1),))
    (path,) = draw_paths([first, second], seed=0)
    assert path.token_ids.tolist() == [1, 2, 5, 6, 9, 7]
    assert path.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert path.logprobs.tolist() == [0, 0, -1, -2, 0, -101]
    assert (path.version_min, path.version_max, path.num_trainable) == (3, 4, 3)
    assert path.owned == ("e-a0-i000", "e-a0-i001")


def test_two_interleaved_conversations_are_two_branches() -> None:
    a1 = call(0, SYSTEM_A, (5,))
    b1 = call(1, SYSTEM_B, (6,), leaf_class="sub-agent")
    a2 = call(2, then(a1, 8), (5, 5))
    b2 = call(3, then(b1, 8), (6, 6), leaf_class="sub-agent")
    paths = draw_paths([a1, b1, a2, b2], seed=1)
    assert names(paths) == ["2", "3"], "the main agent's leaf comes first"
    assert [path.owned for path in paths] == [("e-a0-i000", "e-a0-i002"), ("e-a0-i001", "e-a0-i003")]


def test_three_leaves_train_their_shared_prefix_once() -> None:
    root = call(0, (1,), (2, 2, 2))
    leaves = [call(index, then(root, 10 + index), (index,)) for index in (1, 2, 3)]
    paths = draw_paths([root, *leaves], seed=5)
    assert [path.num_trainable for path in paths] == [4, 1, 1]
    assert Counter(name for path in paths for name in path.owned) == Counter(
        call.vertex.invocation_id for call in [root, *leaves]
    )


def test_no_more_paths_are_drawn_than_asked_for() -> None:
    calls = [call(index, (1, index + 2), (7,)) for index in range(9)]
    assert len(draw_paths(calls, seed=0)) == 5
    assert len(draw_paths(calls, seed=0, max_paths=2)) == 2
    assert len(draw_paths(calls, seed=0, max_paths=None)) == 9


def test_classes_are_drawn_in_the_order_that_the_caller_gives() -> None:
    calls = [
        call(0, (1,), (7,), leaf_class="sub-agent-summary"),
        call(1, (2,), (7,), leaf_class="main-summary"),
        call(2, (3,), (7,), leaf_class="sub-agent"),
        call(3, (4,), (7,), leaf_class="main"),
    ]
    assert names(draw_paths(calls, seed=0)) == ["3", "1", "2", "0"]
    order = ("sub-agent", "main", "sub-agent-summary", "main-summary")
    assert names(draw_paths(calls, seed=0, class_order=order)) == ["2", "3", "0", "1"]


def test_a_leaf_is_drawn_in_proportion_to_its_unmasked_tokens() -> None:
    calls = [call(0, (1,), (7,) * 30), call(1, (2,), (7,) * 10)]
    first = Counter(names(draw_paths(calls, seed=seed, max_paths=1))[0] for seed in range(2000))
    assert 1400 < first["0"] < 1600  # three in four; six standard deviations are 116


def test_an_answer_that_a_prompt_repeats_only_in_part_is_shared_to_that_token() -> None:
    first = call(0, (1,), (5, 6, 7))
    cut = call(1, (1, 5, 6, 9), (8,))
    paths = draw_paths([first, cut], seed=0, max_paths=None)
    assert sorted(emitted(paths)) == [-101, -3, -2, -1]
    assert {path.token_ids.tolist()[-1] for path in paths} == {7, 8}


def test_equal_answers_are_two_leaves_and_an_edge_says_which_one_goes_on() -> None:
    twins = [call(index, (1,), (5,)) for index in (0, 1)]
    parent = (twins[1].vertex.invocation_id, EdgeKind.DATA)
    after = call(2, (1, 5, 9), (8,), parents=(parent,))
    paths = {path.leaf_invocation[-1]: path for path in draw_paths([*twins, after], seed=0)}
    assert paths["2"].owned == ("e-a0-i001", "e-a0-i002")
    assert paths["0"].owned == ("e-a0-i000",)


@pytest.mark.parametrize(
    "overrides",
    [{"unusable": "cut"}, {"reward": None}, {"state": InvocationState.CANCELLED}, {"token_ids": ()}],
)
def test_a_call_that_cannot_be_trained_on_is_context_for_the_next(overrides: dict[str, Any]) -> None:
    first = call(0, (1,), (5,))
    lost = call(1, then(first, 9), (6, 6), **(overrides | _no_tokens(overrides)))
    last = call(2, (*then(first, 9), 6, 6, 9), (7,))
    (path,) = draw_paths([first, lost, last], seed=0)
    assert path.owned == ("e-a0-i000", "e-a0-i002")
    assert path.loss_mask.tolist() == [0, 1, 0, 0, 0, 0, 1]


def _no_tokens(overrides: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": (), "version_spans": ()} if "token_ids" in overrides else {}


@pytest.mark.parametrize("other", [{"agent": "critic"}, {"temperature": 0.7}, {"reward": 0.0}])
def test_tokens_of_another_credit_are_context_and_have_a_path_of_their_own(other: dict[str, Any]) -> None:
    first = call(0, (1,), (5, 5), **other)
    second = call(1, then(first, 9), (6,))
    paths = {path.leaf_invocation[-1]: path for path in draw_paths([first, second], seed=3)}
    assert paths["1"].loss_mask.tolist() == [0, 0, 0, 0, 1]
    assert paths["0"].loss_mask.tolist() == [0, 1, 1]
    assert (paths["0"].agent, paths["0"].temperature, paths["0"].reward) == (
        first.vertex.agent,
        first.vertex.temperature,
        first.reward,
    )


def test_nothing_to_train_gives_no_path() -> None:
    assert draw_paths([], seed=0) == []
    assert draw_paths([call(0, (1,), (5,), unusable="cut")], seed=0) == []


def test_a_call_with_fewer_logprobs_than_tokens_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="e-a0-i004: 2 tokens with 1 logprobs and versions for 2"):
        draw_paths([call(4, (1,), (5, 6), logprobs=(-1.0,))], seed=0)


def test_an_unknown_leaf_class_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="e-a0-i000: leaf class 'side', expected one of main"):
        draw_paths([call(0, (1,), (5,), leaf_class="side")], seed=0)


@st.composite
def trees(draw: st.DrawFn) -> list[Candidate]:
    """Calls that continue, cut, repeat or ignore earlier ones, over two tokens so that they often collide."""
    calls: list[Candidate] = []
    tokens = st.lists(st.integers(1, 2), max_size=3).map(tuple)
    for index in range(draw(st.integers(1, 8))):
        before = draw(st.sampled_from(calls)) if calls and draw(st.booleans()) else None
        known = ids(before.vertex) if before else (1,)
        kept = draw(st.integers(1, len(known)))
        parents = ((before.vertex.invocation_id, EdgeKind.DATA),) if before and draw(st.booleans()) else ()
        calls.append(
            call(
                index,
                known[:kept] + draw(tokens),
                draw(tokens),
                parents=parents,
                leaf_class=draw(st.sampled_from(["main", "sub-agent"])),
                unusable="cut" if draw(st.integers(0, 5)) == 0 else None,
                reward=draw(st.sampled_from([1.0, 1.0, 1.0, 0.0])),
            )
        )
    return calls


@settings(max_examples=300, deadline=None)
@given(calls=trees(), seed=st.integers(0, 3), max_paths=st.integers(1, 4))
def test_every_usable_token_has_one_owner_on_a_path_that_it_was_sampled_on(
    calls: list[Candidate], seed: int, max_paths: int
) -> None:
    usable = {
        logprob: (c.vertex, place)
        for c in calls
        if c.vertex.unusable is None
        for place, logprob in enumerate(c.vertex.logprobs)
    }
    paths = draw_paths(calls, seed=seed, max_paths=None)
    tokens = emitted(paths)
    assert len(tokens) == len(set(tokens)) and set(tokens) == set(usable)
    for path in paths:
        assert path.num_trainable == int(path.loss_mask.sum()) > 0
        for place in np.flatnonzero(path.loss_mask):
            vertex, offset = usable[float(path.logprobs[place])]
            assert (
                tuple(path.token_ids[: place + 1])
                == (vertex.prompt_ids or ()) + vertex.token_ids[: offset + 1]
            )
            assert vertex.invocation_id in path.owned
    bounded = draw_paths(calls, seed=seed, max_paths=max_paths)
    assert len(bounded) == min(max_paths, len(paths)), "a bound never leaves less than it must"
    assert [path.leaf_invocation for path in bounded] == [path.leaf_invocation for path in paths[:max_paths]]
    assert emitted(bounded) == emitted(paths[:max_paths])
