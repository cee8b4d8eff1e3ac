"""A request on its way through the engine: what was asked, what was sampled so far, by which version."""

from __future__ import annotations

from collections.abc import Sequence

from megloom.compute.engines.protocol import FinishReason, VersionSpan


class LiveRequest:
    """The mutable state of one request. Written by the batcher only, through `extend` and `finish_reason`.

    `finish_reason` is None while it lives. `num_in_cache` counts leading tokens whose keys and values its
    slot holds, under one policy version if `has_pure_cache`.
    """

    __slots__ = (
        "_version_starts",
        "cached_tokens",
        "finish_reason",
        "has_pure_cache",
        "logprobs",
        "max_tokens",
        "num_retractions",
        "output_ids",
        "prompt_ids",
        "rid",
        "seed",
        "stop_ids",
        "temperature",
        "top_k",
        "top_p",
    )

    def __init__(
        self,
        *,
        rid: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.rid = rid
        self.prompt_ids = list(prompt_ids)
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.seed = seed
        self.stop_ids = stop_ids
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.num_retractions = 0
        self.has_pure_cache = True
        self._version_starts: list[tuple[int, int]] = []  # (version, first output index it sampled)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_ids + self.output_ids

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> bool:
        """Adds sampled tokens, of which only the last may end the request; returns whether it does."""
        if not self._version_starts or self._version_starts[-1][0] != version:
            self._version_starts.append((version, len(self.output_ids)))
        self.output_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        if token_ids[-1] in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.output_ids) >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None

    def version_spans(self) -> list[VersionSpan]:
        """Returns which version sampled which output tokens; the spans cover them all in order."""
        starts = [start for _, start in self._version_starts]
        ends = [*starts, len(self.output_ids)][1:]
        return [
            VersionSpan(version=version, start=start, end=end)
            for (version, start), end in zip(self._version_starts, ends, strict=True)
        ]
