"""Rows with common prefixes: found, cut and laid in one line; the model makes of them what it makes apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megloom.compute.trainers.forest import lay_out
from megloom.compute.trainers.forest_attention import LineAttention, flex_mask, use_forest_attention
from megloom.compute.trainers.heads import read_out
from megloom.compute.trainers.model import load_model, write_model
from megloom.compute.trainers.passes import Budget, Part, collate, cut
from megloom.compute.trainers.protocol import TrainerError, TrainingRow
from megloom.compute.trainers.tree import Tree, find_trees, num_needed, split

from .builders import VOCAB_SIZE, model, row

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    write_model(model(architecture=request.param), folder, seed=3, cache_dir=None)
    return load_model(folder, CPU)


def from_ids(ids: Sequence[int], mask: Sequence[int], seed: int = 0, **overrides: Any) -> TrainingRow:
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {
        "sample_id": f"sample-{seed}",
        "token_ids": np.array(ids, np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "logprobs": np.full(len(ids), -2, np.float32),
        "advantage": float(rng.normal()),
        "temperature": float(rng.uniform(0.5, 1.5)),
        **overrides,
    }
    return row(seed, **values)


@st.composite
def forests(draw: st.DrawFn, max_own: int = 90) -> list[TrainingRow]:
    """Rows of two episodes, some of them branches off earlier ones: copies and mere prefixes too.

    Any token but the first may be trainable, in several rows or none, the last of a shared segment as well.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    alphabet = draw(st.sampled_from([2, VOCAB_SIZE]))  # of 2 letters: rows meet by chance
    rows: list[TrainingRow] = []
    for number in range(draw(st.integers(1, 8))):
        past = rows[draw(st.integers(0, number - 1))].token_ids if number and draw(st.booleans()) else []
        kept = past[: draw(st.integers(0, len(past)))]
        own = rng.integers(0, alphabet, draw(st.integers(0 if len(kept) > 1 else 2, max_own)))
        ids = [*map(int, kept), *map(int, own)]
        mask = rng.random(len(ids)) < draw(st.sampled_from([0.1, 0.9]))
        mask[0], mask[-1] = False, True
        rows.append(from_ids(ids, mask.tolist(), number, episode_id=f"episode-{number % 2}"))
    return rows


def result(network: Any, parts: Sequence[Part]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The logprobs of each sample, and the gradient of Σ advantage · logprob."""
    network.zero_grad()
    logprobs: dict[str, Tensor] = {}
    for part in parts:
        made = collate(part, CPU)
        logprobs_N = read_out(network, made).logprobs_N
        (logprobs_N * made.advantages_N * made.weights_N).sum().backward()
        for number, sample_id in enumerate(made.sample_ids):
            logprobs[sample_id] = logprobs_N.detach()[made.rows_N == number]
    return logprobs, {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0].keys() == other[0].keys()
    for sample_id, logprobs in one[0].items():
        assert torch.allclose(logprobs, other[0][sample_id], atol=1e-5, rtol=1e-5)
    norm = sum(float(value.double().square().sum()) for value in one[1].values()) ** 0.5
    gap = sum(float((one[1][name] - other[1][name]).double().square().sum()) for name in one[1]) ** 0.5
    assert gap <= 1e-5 * norm


def apart(rows: Sequence[TrainingRow]) -> list[Part]:
    return [Part(rows=(one,)) for one in rows]


@settings(max_examples=12, deadline=None)
@given(rows=forests(), budget=st.sampled_from([60, 200, 4096]))
def test_a_tree_gives_the_logprobs_and_gradients_of_its_rows_apart(
    network: Any, rows: list[TrainingRow], budget: int
) -> None:
    trees = cut(rows, Budget(rows=100, tree=budget), min_saved=0.0)
    assert_same(result(network, apart(rows)), result(network, trees))


def test_a_token_after_the_last_shared_one_is_predicted_by_the_shared_state(network: Any) -> None:
    rows = [from_ids([1, 2, 3, token, 5], [0, 0, 0, 1, 0], token) for token in (4, 6, 4, 9)]
    part = cut(rows, 100)[0]
    made = collate(part, CPU)
    assert part.shared is not None and made.num_computed == 3
    assert made.positions_N.tolist() == [2, 2, 2, 2]
    assert_same(result(network, apart(rows)), result(network, [part]))


def test_recomputing_activations_changes_nothing(network: Any) -> None:
    rows = [from_ids([1, 2, 3, 4, *range(own)], [0, 0, *[1] * (own + 2)], own) for own in (3, 9, 12)]
    expected = result(network, cut(rows, 100))
    network.train()
    network.activation_checkpointing_enable()
    try:
        assert_same(expected, result(network, cut(rows, 100)))
    finally:
        network.activation_checkpointing_disable()
        network.eval()


def test_all_tokens_of_a_row_are_in_one_pass_under_its_own_number() -> None:
    rows = [from_ids([*range(10), *range(own)], [0, *[1] * (own + 9)], own) for own in (3, 9, 12)]
    made = [collate(part, CPU) for part in cut(rows, 25, min_saved=0.0)]
    counts = {
        part.sample_ids[i]: int((part.rows_N == i).sum()) for part in made for i in part.rows_N.unique()
    }
    assert counts == {one.sample_id: int(one.loss_mask.sum()) for one in rows}


@settings(max_examples=100, deadline=None)
@given(rows=forests(max_own=12))
def test_each_shared_token_is_computed_once(rows: list[TrainingRow]) -> None:
    trees = find_trees(rows, min_saved=0.0)
    prefixes = {tuple(one.token_ids[: i + 1]) for one in rows for i in range(num_needed(one))}
    assert sum(tree.num_tokens for tree in trees) == len(prefixes)
    assert sorted(r.sample_id for tree in trees for r in tree.rows) == sorted(r.sample_id for r in rows)


@settings(max_examples=100, deadline=None)
@given(rows=forests(max_own=90))
def test_a_query_sees_the_tokens_of_its_row_up_to_itself_and_no_other(rows: list[TrainingRow]) -> None:
    trees = find_trees(rows, min_saved=0.0)
    ordered = [one for tree in trees for one in tree.rows]
    line = lay_out([num_needed(one) for one in ordered], [n for tree in trees for n in tree.shared])
    expected = np.zeros((line.num_tokens, line.num_tokens), bool)
    for one, path in zip(ordered, line.paths, strict=True):
        assert line.depths_T[path].tolist() == list(range(num_needed(one)))
        for depth, place in enumerate(path):
            expected[place, path[: depth + 1]] = True
    found = np.zeros_like(expected)
    for block in line.blocks:
        visible = line.is_visible_QK(block)
        found[block.start : block.stop, block.keys_K] = visible
        assert not block.is_causal or (visible == np.tri(len(visible), dtype=bool)).all()
    assert (found == expected).all()
    assert [block.start for block in line.blocks[1:]] == [block.stop for block in line.blocks[:-1]]


def fewest_tokens(tree: Tree, budget: int) -> int:
    """Over all ways to cut, by trying them."""
    count, least = len(tree.rows), 10**9
    for marks in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, mark in enumerate(marks) if mark), count]
        sizes = [sum(tree.lengths[a:b]) - sum(tree.shared[a + 1 : b]) for a, b in itertools.pairwise(edges)]
        fits = all(
            size <= budget or b - a == 1
            for size, (a, b) in zip(sizes, itertools.pairwise(edges), strict=True)
        )
        least = min(least, sum(sizes)) if fits else least
    return least


@settings(max_examples=60, deadline=None)
@given(rows=forests(max_own=12), budget=st.integers(4, 40))
def test_a_tree_above_the_budget_is_cut_where_it_repeats_least(rows: list[TrainingRow], budget: int) -> None:
    for tree in find_trees(rows, min_saved=0.0):
        parts = split(tree, budget)
        assert all(part.num_tokens <= budget or len(part.rows) == 1 for part in parts)
        assert [one for part in parts for one in part.rows] == list(tree.rows)
        assert sum(part.num_tokens for part in parts) == fewest_tokens(tree, budget)


def test_the_limit_of_a_tree_is_its_own_and_a_plain_number_bounds_all() -> None:
    rows = [from_ids([*range(20), own, 0], [0] * 21 + [1], own) for own in range(10)]
    assert [part.num_computed for part in cut(rows, Budget(rows=21, tree=30))] == [30]
    bounded = cut(rows, 25)
    assert [part.num_computed for part in bounded] == [25, 25]
    assert [len(part.rows) for part in cut(rows, 42, shared_prefixes=False)] == [2] * 5


def test_a_prefix_too_short_to_matter_makes_no_tree() -> None:
    rows = [from_ids([7, own, *range(20)], [0] * 21 + [1], own) for own in range(4)]
    assert [part.shared for part in cut(rows, 100)] == [None]
    assert [part.num_computed for part in cut(rows, 100, min_saved=0.0)] == [81]


def test_small_trees_share_a_line_and_stay_apart_in_it(network: Any) -> None:
    rows = [
        from_ids([*range(3, 9), *rest], [0] * 5 + [1] * (1 + len(rest)), number, episode_id=str(number // 2))
        for number, rest in enumerate([(1, 2), (2, 3, 4)])
    ]
    rows += [from_ids([1, *one.token_ids], [0, *one.loss_mask], 9 + i) for i, one in enumerate(rows)]
    parts = cut(rows, 100)
    assert [part.shared for part in parts] == [(0, 6, 0, 7)]
    assert_same(result(network, apart(rows)), result(network, parts))


def test_the_same_rows_in_another_order_make_the_same_sums(network: Any) -> None:
    rows = [
        from_ids([*range(own % 7, 12), *range(own)], [0] * 4 + [1] * (8 - own % 7 + own), own)
        for own in range(2, 14)
    ]
    budget = Budget(rows=50, tree=90)
    assert_same(result(network, cut(rows, budget)), result(network, cut(rows[::-1], budget)))
    again = [[r.sample_id for r in part.rows] for part in cut(rows, budget)]
    assert again == [[r.sample_id for r in part.rows] for part in cut(rows, budget)]


def test_a_model_with_sliding_windows_is_refused(network: Any) -> None:
    config = type(network.config)(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2)
    windowed = type("Windowed", (), {"config": config})()
    with pytest.raises(TrainerError, match="sliding windows: set the trainer's packing"):
        use_forest_attention(windowed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_the_mask_for_flex_attention_is_the_same(network: Any) -> None:
    """Uncompiled, which is slow and needs no compiler; the compiled form is the same function of the mask."""
    rows = [from_ids([*range(12), *range(own)], [0, *[1] * (own + 11)], own) for own in (3, 9, 11)]
    rows.append(from_ids([5, *range(9)], [0, *[1] * 9], 70))
    part = Part(rows=tuple(rows), shared=(0, 12, 12, 0))
    made = collate(part, CPU)
    line = lay_out([num_needed(one) for one in rows], (0, 12, 12, 0))
    by_flex = replace(made, attention=LineAttention(flex=flex_mask(line, CPU, compiles=False)))
    with torch.no_grad():
        ours, theirs = read_out(network, made).logprobs_N, read_out(network, by_flex).logprobs_N
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiles", [True, False])
def test_on_a_gpu_trees_give_the_gradients_of_their_rows_apart(
    network: Any, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled FlexAttention, and the blocks that stand in for it where compilation is turned off."""
    if not compiles:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    rng = np.random.default_rng(0)
    past = rng.integers(0, VOCAB_SIZE, 150).tolist()
    rows = [
        from_ids([*past[:kept], *rng.integers(0, VOCAB_SIZE, own)], [0] * kept + [1] * own, i)
        for i, (kept, own) in enumerate([(150, 40), (150, 90), (70, 30), (70, 1), (20, 5)])
    ]
    expected = result(network, apart(rows))
    network.cuda()
    try:
        network.zero_grad()
        made = collate(cut(rows, 4096, min_saved=0.0)[0], torch.device("cuda"))
        logprobs_N = read_out(network, made).logprobs_N
        (logprobs_N * made.advantages_N * made.weights_N).sum().backward()
        for number, sample_id in enumerate(made.sample_ids):
            found = logprobs_N.detach()[made.rows_N == number].cpu()
            assert torch.allclose(found, expected[0][sample_id], atol=1e-3)
        for name, parameter in network.named_parameters():
            gap = (parameter.grad.cpu() - expected[1][name]).norm()
            assert gap <= 1e-3 * expected[1][name].norm() + 1e-6, name
    finally:
        network.cpu()
