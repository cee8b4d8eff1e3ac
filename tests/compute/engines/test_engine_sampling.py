"""Draws follow the stated distribution, replay by seed and do not look at the rest of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megloom.compute.engines.sampling import sample, sampling_columns, uniforms

CPU = torch.device("cpu")


def draw(logits, rows, positions):
    return sample(
        torch.tensor(logits),
        sampling_columns(rows, len(logits[0]), CPU),
        np.array(positions, dtype=np.uint64),
    )


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    positions = np.tile(np.arange(200, dtype=np.uint64), 200)
    values = uniforms(seeds, positions)
    assert len(np.unique(values)) == len(values)
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert np.abs(counts - 2000).max() < 6 * math.sqrt(2000)
    grid = values.reshape(200, 200)
    for pair in (grid[:, :-1] * grid[:, 1:], grid[:-1] * grid[1:]):
        assert pair.mean() == pytest.approx(0.25, abs=0.01)


def test_frequencies_follow_the_tempered_distribution():
    logits = [[0.0, 1.0, 2.0, -math.inf]] * 20_000
    ids, logprobs = draw(logits, [(seed, 0.5, 1.0, -1) for seed in range(20_000)], [3] * 20_000)
    expected = torch.softmax(torch.tensor(logits[0]) / 0.5, dim=-1)
    frequencies = torch.bincount(ids, minlength=4) / 20_000
    torch.testing.assert_close(frequencies, expected, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[ids])


def test_draw_does_not_depend_on_the_other_rows():
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [(seed, 0.3 * seed, 1.0, -1) for seed in range(6)]
    together, _ = draw(logits, rows, range(6))
    for row in range(6):
        alone, _ = draw([logits[row]], [rows[row]], [row])
        assert alone[0] == together[row]


def test_truncation_narrows_the_draw_but_not_the_logprob():
    logits = [[3.0, 2.0, 1.0, 0.0]] * 600
    full = torch.log_softmax(torch.tensor(logits[0]), dim=-1)
    for rule, kept in (((1.0, 2), {0, 1}), ((0.7, -1), {0, 1}), ((0.01, -1), {0})):
        ids, logprobs = draw(logits, [(seed, 1.0, *rule) for seed in range(600)], [0] * 600)
        assert set(ids.tolist()) == kept
        torch.testing.assert_close(logprobs, full[ids])


def test_greedy_row_beside_sampled_rows_takes_the_best_id_at_temperature_one():
    logits = [[0.0, 3.0, 1.0]] * 3
    ids, logprobs = draw(logits, [(1, 0.0, 1.0, -1), (2, 5.0, 1.0, -1), (3, 0.0, 1.0, -1)], [0, 0, 0])
    assert (ids[0], ids[2]) == (1, 1)
    assert float(logprobs[0]) == pytest.approx(3 - math.log(1 + math.exp(3) + math.e), abs=1e-6)
