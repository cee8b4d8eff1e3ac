"""Rows become forward passes whose logprobs are those of the model, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megloom.compute.trainers.model import load_model, write_model
from megloom.compute.trainers.passes import check_row, collate, cut, token_logprobs
from megloom.compute.trainers.protocol import TrainerError, TrainingRow

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
    for part in cut(rows, 200):
        with torch.no_grad():
            ours = token_logprobs(network, collate(part, CPU)).tolist()
        expected = [value for one in part for value in full_logprobs(network, one)]
        assert ours == pytest.approx(expected, abs=2e-5)


def test_a_mask_with_holes_picks_exactly_its_tokens(network: Any) -> None:
    mask = np.array([0, 1, 0, 1, 1, 0, 0], np.uint8)
    holed = row(1, loss_mask=mask)
    part = collate([holed, row(2, num_sampled=9)], CPU)
    ours = token_logprobs(network, part).tolist()[:3]
    assert ours == pytest.approx(full_logprobs(network, holed), abs=2e-5)
    assert [part.sample_of(i) for i in (0, 2, 3)] == ["sample-1", "sample-1", "sample-2"]


def test_passes_stay_within_the_budget_and_keep_every_row() -> None:
    rows = ragged_rows(100)
    parts = cut(rows, 120)
    assert all(len(part) * max(len(r.token_ids) for r in part) <= 120 for part in parts)
    assert sorted(r.sample_id for part in parts for r in part) == sorted(r.sample_id for r in rows)


def test_a_row_above_the_budget_has_a_pass_of_its_own() -> None:
    rows = [row(1), row(2, num_prompt=50), row(3), row(4, num_prompt=60)]
    assert [[r.sample_id for r in part] for part in cut(rows, 30)] == [
        ["sample-1", "sample-3"],
        ["sample-2"],
        ["sample-4"],
    ]


def test_padding_is_small_when_rows_are_ragged() -> None:
    parts = cut(ragged_rows(200), 1024)
    real = sum(len(r.token_ids) for part in parts for r in part)
    padded = sum(len(part) * max(len(r.token_ids) for r in part) for part in parts)
    assert padded < 1.35 * real


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
    ],
)
def test_a_row_that_would_poison_the_sums_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=f"sample sample-5: .*{message}"):
        check_row(row(5, **overrides), vocab_size=VOCAB_SIZE, needs_behaviour=True)


def test_a_demonstration_needs_no_behaviour() -> None:
    check_row(row(5, logprobs=np.full(7, np.nan, np.float32)), vocab_size=VOCAB_SIZE, needs_behaviour=False)
