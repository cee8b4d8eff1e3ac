"""Rows become forward passes whose logprobs are those of the model, row by row. Trees: test_trees.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megloom.compute.trainers.heads import read_out
from megloom.compute.trainers.model import load_model, write_model
from megloom.compute.trainers.passes import Part, check_row, collate, cut
from megloom.compute.trainers.protocol import TrainerError, TrainingRow
from megloom.compute.trainers.tree import num_needed

from .builders import VOCAB_SIZE, model, ragged_rows, row

CPU = torch.device("cpu")


@pytest.fixture(params=["qwen3", "llama"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    write_model(model(architecture=request.param), tmp_path, seed=3, cache_dir=None)
    yield load_model(tmp_path, CPU)


def full_logprobs(network: Any, training_row: TrainingRow) -> list[float]:
    """The slow reference: one row alone, the model's own logits at every position."""
    ids = torch.tensor(training_row.token_ids[None].astype(np.int64))
    with torch.no_grad():
        logits = network(input_ids=ids).logits[0].double() / training_row.temperature
    table = torch.log_softmax(logits, -1)
    return [float(table[t - 1, ids[0, t]]) for t in np.flatnonzero(training_row.loss_mask)]


def test_logprobs_equal_a_full_forward_of_each_row_alone(network: Any) -> None:
    rows = [*ragged_rows(12), row(50, temperature=0.7), row(51, temperature=1.6, num_prompt=17)]
    for part in [*cut(rows, 200), *cut(rows, 200, packing=False)]:
        with torch.no_grad():
            ours = read_out(network, collate(part, CPU)).logprobs_N.tolist()
        expected = [value for one in part.rows for value in full_logprobs(network, one)]
        assert ours == pytest.approx(expected, abs=2e-5)


def test_a_mask_with_holes_picks_exactly_its_tokens(network: Any) -> None:
    mask = np.array([0, 1, 0, 1, 1, 0, 0], np.uint8)
    holed = row(1, loss_mask=mask)
    part = collate([holed, row(2, num_sampled=9)], CPU)
    ours = read_out(network, part).logprobs_N.tolist()[:3]
    assert ours == pytest.approx(full_logprobs(network, holed), abs=2e-5)
    assert [part.sample_of(i) for i in (0, 2, 3)] == ["sample-1", "sample-1", "sample-2"]


def test_packed_rows_see_nothing_of_each_other(network: Any) -> None:
    rows = ragged_rows(9)
    rows = [
        replace(one, token_ids=np.r_[i, one.token_ids[1:]].astype(np.int32)) for i, one in enumerate(rows)
    ]
    changed = replace(rows[4], token_ids=(rows[4].token_ids + 1) % VOCAB_SIZE)
    ours, others = [], []
    for these, found in ((rows, ours), ([*rows[:4], changed, *rows[5:]], others)):
        part = collate(Part(rows=tuple(these), shared=(0,) * 9), CPU)
        assert part.token_ids_BT.shape == (1, sum(num_needed(one) for one in rows))
        with torch.no_grad():
            found.extend(read_out(network, part).logprobs_N[part.rows_N == number] for number in range(9))
    assert [torch.equal(one, other) for one, other in zip(ours, others, strict=True)] == [
        number != 4 for number in range(9)
    ]


def test_rows_of_one_length_are_padded_and_ragged_ones_packed() -> None:
    even = [row(seed) for seed in range(8)]
    ragged = [row(seed, num_sampled=3 * seed + 1) for seed in range(8)]
    layouts = [
        [part.shared for part in cut(rows, 1000, shared_prefixes=False, packing=packing)]
        for rows, packing in ((even, True), (ragged, True), (ragged, False))
    ]
    assert layouts == [[None], [(0,) * 8], [None]]


@pytest.mark.parametrize("packing", [True, False])
def test_passes_stay_within_the_budget_and_keep_every_row(packing: bool) -> None:
    rows = ragged_rows(100)
    parts = cut(rows, 120, packing=packing)
    for part in parts:
        made = collate(part, CPU)
        assert made.token_ids_BT.numel() == made.num_computed == part.num_computed <= 120
    assert sorted(r.sample_id for part in parts for r in part.rows) == sorted(r.sample_id for r in rows)


def test_a_row_above_the_budget_has_a_pass_of_its_own() -> None:
    rows = [row(1), row(2, num_prompt=50), row(3), row(4, num_prompt=60)]
    assert [[r.sample_id for r in part.rows] for part in cut(rows, 30)] == [
        ["sample-1", "sample-3"],
        ["sample-2"],
        ["sample-4"],
    ]


def test_packing_leaves_little_padding() -> None:
    rows = ragged_rows(200)
    real = sum(num_needed(one) for one in rows)
    assert sum(part.num_computed for part in cut(rows, 1024)) <= 1.05 * real
    assert sum(part.num_computed for part in cut(rows, 1024, packing=False)) < 1.35 * real


def test_tokens_behind_the_last_trainable_one_do_not_go_through_the_model(network: Any) -> None:
    mask = np.array([0, 0, 1, 0, 0, 0, 0], np.uint8)
    part = collate([row(1, loss_mask=mask)], CPU)
    assert part.token_ids_BT.shape == (1, 2)
    assert read_out(network, part).logprobs_N.tolist() == pytest.approx(
        full_logprobs(network, row(1, loss_mask=mask)), abs=2e-5
    )


def test_the_output_layer_sees_the_trainable_tokens_alone(network: Any) -> None:
    shapes: list[Any] = []
    network.get_output_embeddings().register_forward_hook(lambda *seen: shapes.append(seen[2].shape))
    part = collate([row(1, num_prompt=90), row(2)], CPU)
    read_out(network, part)
    assert shapes == [(6, VOCAB_SIZE)]


def test_columns_follow_their_tokens_and_a_nan_in_a_masked_slot_is_never_read() -> None:
    def column(one: TrainingRow, offset: float) -> Any:
        return np.where(one.loss_mask, np.arange(len(one.token_ids)) + offset, np.nan).astype(np.float32)

    rows = [
        replace(r, columns={"advantages": column(r, 0.5), "values": column(r, 7)}) for r in ragged_rows(3)
    ]
    for one in rows:
        check_row(one, vocab_size=VOCAB_SIZE, needs_behaviour=True)
    for part in (Part(rows=tuple(rows)), Part(rows=tuple(rows), shared=(0, 0, 0))):
        made = collate(part, CPU)
        where = np.concatenate([np.flatnonzero(one.loss_mask) for one in rows])
        assert made.advantages_N.tolist() == (where + 0.5).tolist()
        assert made.columns_N.keys() == {"values"}
        assert made.columns_N["values"].tolist() == (where + 7.0).tolist()


def test_rows_of_a_pass_have_the_same_columns() -> None:
    odd = row(2, columns={"values": np.zeros(7, np.float32)})
    with pytest.raises(TrainerError, match=r"sample sample-1: columns \[\], its pass has \['values'\]"):
        collate([row(1), odd], CPU)


def test_a_pass_of_no_rows_costs_nothing_and_reaches_every_parameter(network: Any) -> None:
    part = collate(Part(rows=()), CPU)
    logprobs_N = read_out(network, part).logprobs_N
    assert (len(logprobs_N), part.num_computed) == (0, 1)
    logprobs_N.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in network.parameters())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"token_ids": np.array([1, 2, 3], np.int32)}, "arrays of lengths"),
        ({"token_ids": np.full(7, VOCAB_SIZE, np.int32)}, "outside the vocabulary"),
        ({"token_ids": np.full(7, -1, np.int32)}, "outside the vocabulary"),
        ({"loss_mask": np.ones(7, np.uint8)}, "no prefix"),
        ({"temperature": 0.0}, "temperature"),
        ({"advantage": math.nan}, "advantage nan"),
        ({"weight": math.inf}, "weight inf"),
        ({"advantage": 1e39}, "advantage 1e"),
        ({"logprobs": np.full(7, np.nan, np.float32)}, "behaviour logprob of token 4 is nan"),
        ({"columns": {"values": np.full(7, np.inf, np.float32)}}, "values of token 4 is inf"),
        ({"columns": {"values": np.zeros(3, np.float32)}}, "arrays of lengths"),
    ],
)
def test_a_row_that_would_poison_the_sums_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=f"sample sample-5: .*{message}"):
        check_row(row(5, **overrides), vocab_size=VOCAB_SIZE, needs_behaviour=True)


def test_a_demonstration_needs_no_behaviour() -> None:
    check_row(row(5, logprobs=np.full(7, np.nan, np.float32)), vocab_size=VOCAB_SIZE, needs_behaviour=False)
