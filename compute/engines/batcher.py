"""Continuous batching: requests join and leave the running batch between two decode steps.

    waiting ──prefill──▶ running (slot = index) ──stop | length | abort──▶ returned
       ▲                    │
       └──────retract───────┘

Each step first prefills waiting requests within a padded token budget, so that running ones are not starved,
then decodes one token for every running request. Synchronous and single-threaded: its owner calls `step`
and the other verbs from one thread. Every sampled token is labelled with the version that the batcher
serves at that moment.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from megloom.compute.engines.live_request import LiveRequest
from megloom.compute.engines.model import SlotModel, Weights
from megloom.compute.engines.prefixes import BLOCK_TOKENS, PrefixIndex, block_hashes
from megloom.compute.engines.protocol import FinishReason
from megloom.compute.engines.sampling import SamplingColumns, sample, sampling_columns
from megloom.compute.engines.slots import SlotCache, compaction_moves, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class _Admission:
    """A waiting request chosen for prefill and the cached prefix that it starts from."""

    request: LiveRequest
    token_ids: list[int]
    source_slot: int
    num_cached: int

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - self.num_cached


@dataclass(slots=True)
class _Lanes:
    """The running batch as columns for the next decode step; dropped whenever its rows change."""

    ids: torch.Tensor  # [B, 1]
    positions: torch.Tensor  # [B] of the ids
    counters: np.ndarray  # [B] the same on the host, uint64, for the sampler
    columns: SamplingColumns


class Batcher:
    """The running batch and its queue. `running[i]` owns cache slot `i`."""

    def __init__(
        self,
        model: SlotModel,
        cache: SlotCache,
        *,
        version: int,
        max_slots: int,
        prefill_budget_tokens: int,
        device: torch.device,
    ) -> None:
        if max_slots < 1 or prefill_budget_tokens < 1:
            raise ValueError(f"need at least one slot and token, got {max_slots=} {prefill_budget_tokens=}")
        self.version = version
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []
        self.num_sampled = 0
        self._model, self._cache, self._device = model, cache, device
        self._max_slots, self._budget_tokens = max_slots, prefill_budget_tokens
        self._prefixes = PrefixIndex()
        self._lanes: _Lanes | None = None

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    def submit(self, request: LiveRequest) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def abort(self, rid: str) -> LiveRequest | None:
        """Takes a request out and returns it with its partial output; None if it does not live here."""
        for request in self.waiting:
            if request.rid == rid:
                self.waiting.remove(request)
                request.finish_reason = FinishReason.ABORT
                return request
        for slot, request in enumerate(self.running):
            if request.rid == rid:
                request.finish_reason = FinishReason.ABORT
                self._remove([slot])
                return request
        return None

    def retract(self) -> int:
        """Queues all running requests again, before the waiting ones; returns how many.

        They keep their sampled tokens; keys and values are computed anew when they are admitted again.
        """
        num_retracted = len(self.running)
        for request in self.running:
            request.num_retractions += 1
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._lanes = None
        return num_retracted

    def load(self, weights: Weights, version: int) -> None:
        """Replaces the weights; running requests keep their keys and values, nobody else may use those."""
        self._model.weights = weights
        self.version = version
        self.forget_prefixes()
        for request in self.running:
            request.has_pure_cache = False

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._prefixes.clear()

    def step(self) -> list[LiveRequest]:
        """Samples at most one token more for each request plus a prefill; returns those that finished."""
        finished = self._prefill() if self.waiting and len(self.running) < self._max_slots else []
        if self.running:
            finished += self._decode()
        return finished

    def _choose(self) -> list[_Admission]:
        """Takes the next requests to prefill from the queue, in order, as far as slots and budget allow.

        A request is passed over for one step if another one of the same prefill is about to compute more of
        its prompt than the cache holds: then it copies that instead. So a group that samples one prompt
        many times computes it once.
        """
        chosen: list[_Admission] = []
        passed_over: list[LiveRequest] = []
        coming: set[int] = set()
        widest = 0
        num_free = self._max_slots - len(self.running)
        while self.waiting and len(chosen) + len(passed_over) < num_free:
            request = self.waiting[0]
            token_ids = request.token_ids
            hashes = block_hashes(token_ids[:-1])
            slot, num_cached = self._prefixes.find(token_ids[:-1], hashes)
            if not coming.isdisjoint(hashes[num_cached // BLOCK_TOKENS :]):
                passed_over.append(self.waiting.popleft())
                continue
            admission = _Admission(
                request=request, token_ids=token_ids, source_slot=slot, num_cached=num_cached
            )
            widest = max(widest, admission.num_new)
            if chosen and widest * (len(chosen) + 1) > self._budget_tokens:
                break
            chosen.append(admission)
            coming.update(hashes)
            self.waiting.popleft()
        self.waiting.extendleft(reversed(passed_over))
        return chosen

    def _prefill(self) -> list[LiveRequest]:
        """Admits waiting requests behind the running ones, samples the first new token of each."""
        chosen = self._choose()
        first = len(self.running)
        lengths = [admission.num_new for admission in chosen]
        starts = [admission.num_cached for admission in chosen]
        width = max(lengths)
        # at least one position more than a row has, since this step's decode appends to it
        num_positions = max(max(starts) + width, *(len(a.token_ids) + 1 for a in chosen))
        self._cache.ensure(first + len(chosen), num_positions)
        self._copy_prefixes(chosen, first)
        ids = torch.zeros((len(chosen), width), dtype=torch.int64)
        for row, admission in enumerate(chosen):
            ids[row, : admission.num_new] = torch.tensor(admission.token_ids[admission.num_cached :])
        rows = self._model.rows(first, starts, lengths, max(starts) + width)
        logits = self._model.forward(self._cache, ids.to(self._device), rows)
        requests = [admission.request for admission in chosen]
        positions = np.array([len(admission.token_ids) for admission in chosen], dtype=np.uint64)
        sampled, logprobs = sample(logits, self._columns(requests), positions)
        for offset, admission in enumerate(chosen):
            admission.request.has_pure_cache = True
            self._prefixes.put(first + offset, admission.token_ids)
            if not admission.request.output_ids:
                admission.request.cached_tokens = admission.num_cached
        self.running.extend(requests)
        self._lanes = None
        return self._append(first, sampled, logprobs)

    def _copy_prefixes(self, chosen: list[_Admission], first: int) -> None:
        copies = [
            (admission.source_slot, first + offset, admission.num_cached)
            for offset, admission in enumerate(chosen)
            if admission.num_cached
        ]
        if copies:
            sources, targets, counts = zip(*copies, strict=True)
            self._cache.copy(sources, targets, max(counts))

    def _columns(self, requests: list[LiveRequest]) -> SamplingColumns:
        return sampling_columns(
            [(r.seed, r.temperature, r.top_p, r.top_k) for r in requests],
            self._model.config.vocab_size,
            self._device,
        )

    def _decode(self) -> list[LiveRequest]:
        """Samples the next token of every running request."""
        lanes = self._lanes or self._new_lanes()
        num_positions = round_up(int(lanes.counters.max()) + 1)
        self._cache.ensure(len(self.running), num_positions)
        rows = self._model.decode_rows(lanes.positions, num_positions)
        logits = self._model.forward(self._cache, lanes.ids, rows)
        counters = lanes.counters + np.uint64(1)
        sampled, logprobs = sample(logits, lanes.columns, counters)
        self._lanes = _Lanes(
            ids=sampled.unsqueeze(1),
            positions=lanes.positions + 1,
            counters=counters,
            columns=lanes.columns,
        )
        return self._append(0, sampled, logprobs)

    def _new_lanes(self) -> _Lanes:
        positions = [request.num_tokens - 1 for request in self.running]
        last = [[request.output_ids[-1]] for request in self.running]
        return _Lanes(
            ids=torch.tensor(last, device=self._device),
            positions=torch.tensor(positions, device=self._device),
            counters=np.array(positions, dtype=np.uint64),
            columns=self._columns(self.running),
        )

    def _append(self, first: int, sampled: torch.Tensor, logprobs: torch.Tensor) -> list[LiveRequest]:
        """Hands the sampled tokens to the running requests from `first` on, takes out the finished ones."""
        finished = []
        version = self.version
        tokens = zip(self.running[first:], sampled.tolist(), logprobs.tolist(), strict=True)
        for slot, (request, token_id, logprob) in enumerate(tokens, start=first):
            if request.append(token_id, logprob, version):
                finished.append(slot)
        self.num_sampled += len(self.running) - first
        return self._remove(finished) if finished else []

    def _remove(self, finished: list[int]) -> list[LiveRequest]:
        """Takes requests out and closes the holes; what they cached can be found until it is overwritten."""
        gone = [self.running[slot] for slot in finished]
        for slot, request in zip(finished, gone, strict=True):
            # the last sampled token has not been through the model
            if request.has_pure_cache:
                self._prefixes.put(slot, request.token_ids[:-1])
            else:
                self._prefixes.drop(slot)
        moves = compaction_moves(len(self.running), finished)
        if moves:
            sources, targets = zip(*moves, strict=True)
            self._cache.copy(sources, targets, max(self.running[source].num_tokens for source in sources))
            for source, target in moves:
                self.running[target] = self.running[source]
                self._prefixes.copy(source, target)
        del self.running[len(self.running) - len(finished) :]
        self._lanes = None
        return gone
