"""Runs the model over the cache slots and samples: what the batcher needs of a way to compute.

`TorchRunner` takes every supported model, device and dtype, one operator at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megloom.compute.engines.checkpoint import ModelConfig
from megloom.compute.engines.live_request import LiveRequest
from megloom.compute.engines.model import SlotModel, Weights
from megloom.compute.engines.sampling import SamplingColumns, sample, sampling_columns
from megloom.compute.engines.slots import SlotCache, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A waiting request chosen for prefill and the cached prefix that it starts from."""

    request: LiveRequest
    token_ids: list[int]
    source_slot: int
    num_cached: int

    @property
    def num_new(self) -> int:
        """Tokens that the prefill computes."""
        return len(self.token_ids) - self.num_cached


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Per row, the sampled tokens and their logprobs; the numbers of steps differ where rows end."""

    ids: list[list[int]]
    logprobs: list[list[float]]


class Runner(Protocol):
    """Owns the cache and the weights. The batcher says what each slot means."""

    max_steps: int  # decode steps that a call should take at most, so that others get their turn

    def load(self, weights: Weights) -> None:
        """Replaces the weights; the cache stays."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copies the first `length` positions of slots to other slots, as if all at once."""

    def prefill(self, first_slot: int, admissions: Sequence[Admission]) -> Sampled:
        """Computes new tokens into consecutive slots, behind their cached prefixes; samples one per row."""

    def decode(self, requests: Sequence[LiveRequest], num_steps: int) -> Sampled:
        """Samples at least one token and at most `num_steps` for the requests of the slots 0, 1, ….

        Samples for no request beyond its end.
        """

    def change_rows(self) -> None:
        """Must be called when a slot's request changes outside of `decode`."""


@dataclass(slots=True)
class _Lanes:
    """The running batch as columns for the next decode step; dropped whenever its rows change."""

    ids: torch.Tensor  # [B, 1]
    positions: torch.Tensor  # [B] of the ids
    counters: np.ndarray  # [B] the same on the host, uint64, for the sampler
    columns: SamplingColumns


def request_columns(
    requests: Sequence[LiveRequest], vocab_size: int, device: torch.device
) -> SamplingColumns:
    """Returns the sampling parameters of the requests as columns."""
    rows = [(r.seed, r.temperature, r.top_p, r.top_k) for r in requests]
    return sampling_columns(rows, vocab_size, device)


class TorchRunner:
    """See `Runner`. Takes one step per call, whatever is allowed."""

    max_steps = 1

    def __init__(
        self, config: ModelConfig, weights: Weights, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model = SlotModel(config, weights, device=device)
        self.cache = SlotCache(config, device=device, dtype=dtype)
        self._vocab_size, self._device = config.vocab_size, device
        self._lanes: _Lanes | None = None

    def load(self, weights: Weights) -> None:
        """See `Runner`."""
        self.model.weights = weights

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """See `Runner`."""
        self.cache.copy(sources, targets, length)

    def change_rows(self) -> None:
        """See `Runner`."""
        self._lanes = None

    def prefill(self, first_slot: int, admissions: Sequence[Admission]) -> Sampled:
        """See `Runner`."""
        self._lanes = None
        lengths = [admission.num_new for admission in admissions]
        starts = [admission.num_cached for admission in admissions]
        width = max(lengths)
        num_positions = max(starts) + width
        self.cache.ensure(first_slot + len(admissions), num_positions)
        copy_prefixes(self, admissions, first_slot)
        ids = torch.zeros((len(admissions), width), dtype=torch.int64)
        for row, admission in enumerate(admissions):
            ids[row, : admission.num_new] = torch.tensor(admission.token_ids[admission.num_cached :])
        rows = self.model.rows(first_slot, starts, lengths, num_positions)
        logits = self.model.forward(self.cache, ids.to(self._device), rows)
        positions = np.array([len(admission.token_ids) for admission in admissions], dtype=np.uint64)
        columns = request_columns([a.request for a in admissions], self._vocab_size, self._device)
        return as_lists(*sample(logits, columns, positions))

    def decode(self, requests: Sequence[LiveRequest], num_steps: int) -> Sampled:
        """See `Runner`."""
        lanes = self._lanes or self._new_lanes(requests)
        num_positions = round_up(int(lanes.counters.max()) + 1)
        self.cache.ensure(len(requests), num_positions)
        rows = self.model.decode_rows(lanes.positions, num_positions)
        logits = self.model.forward(self.cache, lanes.ids, rows)
        counters = lanes.counters + np.uint64(1)
        ids, logprobs = sample(logits, lanes.columns, counters)
        self._lanes = _Lanes(
            ids=ids.unsqueeze(1), positions=lanes.positions + 1, counters=counters, columns=lanes.columns
        )
        return as_lists(ids, logprobs)

    def _new_lanes(self, requests: Sequence[LiveRequest]) -> _Lanes:
        positions = [request.num_tokens - 1 for request in requests]
        last = [[request.output_ids[-1]] for request in requests]
        return _Lanes(
            ids=torch.tensor(last, device=self._device),
            positions=torch.tensor(positions, device=self._device),
            counters=np.array(positions, dtype=np.uint64),
            columns=request_columns(requests, self._vocab_size, self._device),
        )


def copy_prefixes(runner: Runner, admissions: Sequence[Admission], first_slot: int) -> None:
    """Copies the cached prefixes of admissions to their slots."""
    copies = [
        (admission.source_slot, slot, admission.num_cached)
        for slot, admission in enumerate(admissions, start=first_slot)
        if admission.num_cached
    ]
    if copies:
        sources, targets, counts = zip(*copies, strict=True)
        runner.copy(sources, targets, max(counts))


def as_lists(ids: torch.Tensor, logprobs: torch.Tensor) -> Sampled:
    """Returns one step's tokens `[B]`."""
    return Sampled(ids=ids.unsqueeze(1).tolist(), logprobs=logprobs.unsqueeze(1).tolist())
