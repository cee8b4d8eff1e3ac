"""Continuous batching: requests join and leave the running batch between two decode steps.

    waiting ──prefill──▶ running (slot = index) ──stop | length | abort──▶ returned
       ▲                    │
       └──────retract───────┘

Each step first prefills waiting requests within a padded token budget, so that running ones are not starved,
then decodes one token for every running request, or up to `max_steps` if none waits for a free slot.
Synchronous and single-threaded: its owner calls `step` and the other verbs from one thread. Every sampled
token is labelled with the version that the batcher serves at that moment.
"""

from __future__ import annotations

from collections import deque

from megloom.compute.engines.live_request import LiveRequest
from megloom.compute.engines.model import Weights
from megloom.compute.engines.prefixes import BLOCK_TOKENS, PrefixIndex, block_hashes
from megloom.compute.engines.protocol import FinishReason
from megloom.compute.engines.runner import Admission, Runner, Sampled
from megloom.compute.engines.slots import compaction_moves


class Batcher:
    """The running batch and its queue. `running[i]` owns cache slot `i`."""

    def __init__(
        self,
        runner: Runner,
        *,
        version: int,
        max_slots: int,
        prefill_budget_tokens: int,
        max_steps: int = 1,
    ) -> None:
        if max_slots < 1 or prefill_budget_tokens < 1:
            raise ValueError(f"need at least one slot and token, got {max_slots=} {prefill_budget_tokens=}")
        self.version = version
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []
        self.num_sampled = 0
        self._runner = runner
        self._max_slots, self._budget_tokens, self._max_steps = max_slots, prefill_budget_tokens, max_steps
        self._prefixes = PrefixIndex()

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
        self._runner.change_rows()
        return num_retracted

    def load(self, weights: Weights, version: int) -> None:
        """Replaces the weights; running requests keep their keys and values, nobody else may use those."""
        self._runner.load(weights)
        self.version = version
        self.forget_prefixes()
        for request in self.running:
            request.has_pure_cache = False

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._prefixes.clear()

    def step(self) -> list[LiveRequest]:
        """Samples for each request; returns those that finished."""
        finished = self._prefill() if self.waiting and len(self.running) < self._max_slots else []
        if self.running:
            finished += self._decode()
        return finished

    def _choose(self) -> list[Admission]:
        """Takes the next requests to prefill from the queue, in order, as far as slots and budget allow.

        A request is passed over for one step if another one of the same prefill is about to compute more of
        its prompt than the cache holds: then it copies that instead. So a group that samples one prompt
        many times computes it once.
        """
        chosen: list[Admission] = []
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
            admission = Admission(
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
        sampled = self._runner.prefill(first, chosen)
        for slot, admission in enumerate(chosen, start=first):
            admission.request.has_pure_cache = True
            self._prefixes.put(slot, admission.token_ids)
            if not admission.request.output_ids:
                admission.request.cached_tokens = admission.num_cached
        self.running.extend(admission.request for admission in chosen)
        return self._extend(first, sampled)

    def _decode(self) -> list[LiveRequest]:
        """Samples the next tokens of every running request, several unless another waits for a free slot."""
        can_admit = self.waiting and len(self.running) < self._max_slots
        num_steps = 1 if can_admit else self._max_steps
        return self._extend(0, self._runner.decode(self.running, num_steps))

    def _extend(self, first: int, sampled: Sampled) -> list[LiveRequest]:
        """Hands the sampled tokens to the running requests from `first` on, takes out the finished ones."""
        version = self.version
        tokens = zip(self.running[first:], sampled.ids, sampled.logprobs, strict=True)
        finished = [
            slot
            for slot, (request, token_ids, logprobs) in enumerate(tokens, start=first)
            if request.extend(token_ids, logprobs, version)
        ]
        self.num_sampled += sum(map(len, sampled.ids))
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
            self._runner.copy(sources, targets, max(self.running[source].num_tokens for source in sources))
            for source, target in moves:
                self.running[target] = self.running[source]
                self._prefixes.copy(source, target)
        del self.running[len(self.running) - len(finished) :]
        self._runner.change_rows()
        return gone
