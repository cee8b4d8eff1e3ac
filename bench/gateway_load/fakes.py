"""What stands around the gateway in the benchmark: an engine that answers at once and a desk that checks.

The engine's answer is always the same text, so that every request of the load can be built beforehand. The
desk keeps of an episode only its newest path of ids, and tells a call that is lost, doubled or does not
continue the turn before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from megloom.compute.engines.answers import Sampled
from megloom.compute.gateway.protocol import CallEnd, CallRequest, Placement

VERSION = 7
PIECE_TOKENS = 8  # a stream's pieces: the local engine decodes up to so many steps a call


class InstantEngine:
    """`StreamingEngine` without a model: the same ids at once, in one piece or in several."""

    def __init__(self, answer_ids: Sequence[int]) -> None:
        self._whole = [_sampled(tuple(answer_ids))]
        self._pieces = [
            _sampled(tuple(answer_ids[first : first + PIECE_TOKENS]), first)
            for first in range(0, len(answer_ids), PIECE_TOKENS)
        ]

    async def stream(
        self,
        *,
        rid: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
        incremental: bool,
    ) -> AsyncIterator[tuple[Sampled, str | None]]:
        *early, last = self._pieces if incremental else self._whole
        for piece in early:
            yield piece, None
        yield last, "stop"


def _sampled(token_ids: tuple[int, ...], first: int = 0) -> Sampled:
    return Sampled(
        token_ids=token_ids,
        logprobs=tuple(-0.5 - 0.001 * token_id for token_id in token_ids),
        version_spans=((VERSION, first, first + len(token_ids)),),
    )


@dataclass(kw_only=True, slots=True)
class _Episode:
    """What an episode's calls left. Only the desk writes."""

    num_calls: int = 0
    num_new_tokens: int = 0
    last_invocation_id: str = ""
    path: tuple[int, ...] = ()


@dataclass(kw_only=True, slots=True)
class CheckingDesk:
    """`CallDesk` that places at once. `problems` are what a sound run leaves empty."""

    answer_ids: tuple[int, ...]
    num_ended: int = 0
    num_new_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    _open: dict[str, CallRequest] = field(default_factory=dict)
    _episodes: dict[str, _Episode] = field(default_factory=dict)

    async def place(self, call: CallRequest) -> Placement:
        episode = self._episodes.setdefault(call.episode_id, _Episode())
        if call.invocation_id in self._open:
            self._tell(f"{call.invocation_id}: placed twice")
        if call.index != episode.num_calls:
            self._tell(f"{call.invocation_id}: index {call.index}, expected {episode.num_calls}")
        if episode.path and call.prompt_ids[: len(episode.path)] != episode.path:
            self._tell(f"{call.invocation_id}: its prompt does not begin with the turn before it")
        if episode.path and (episode.last_invocation_id, "extends") not in call.parents:
            self._tell(f"{call.invocation_id}: does not extend {episode.last_invocation_id}: {call.parents}")
        episode.num_calls += 1
        new = len(call.prompt_ids) - len(episode.path) + len(self.answer_ids)
        episode.num_new_tokens += new
        self.num_new_tokens += new
        self._open[call.invocation_id] = call
        return Placement(
            invocation_id=call.invocation_id,
            rid=f"{self.num_ended + len(self._open):032x}",
            policy="solver",
            url="http://127.0.0.1:1",
            token="engine",
            engine="instant",
            seed=episode.num_calls,
            stop_token_ids=(self.answer_ids[-1],),
        )

    async def replace(self, invocation_id: str, rid: str, cause: str) -> Placement:
        raise AssertionError(f"{invocation_id}: the engine never goes away, got {cause!r}")

    async def end(self, end: CallEnd) -> None:
        call = self._open.pop(end.invocation_id, None)
        if call is None:
            self._tell(f"{end.invocation_id}: ended without being open")
            return
        self.num_ended += 1
        if end.failure is not None or end.unusable is not None:
            self._tell(f"{end.invocation_id}: failure={end.failure!r} unusable={end.unusable!r}")
        sampled = end.sampled
        if sampled.token_ids != self.answer_ids or len(sampled.logprobs) != len(self.answer_ids):
            self._tell(f"{end.invocation_id}: recorded {sampled}, expected the ids {self.answer_ids}")
        if sampled.version_spans != ((VERSION, 0, len(self.answer_ids)),):
            self._tell(f"{end.invocation_id}: spans {sampled.version_spans}")
        episode = self._episodes[call.episode_id]
        episode.last_invocation_id = end.invocation_id
        episode.path = (*call.prompt_ids, *sampled.token_ids)

    def close(self, episode_id: str, expected_calls: int) -> None:
        """Forgets an episode, whose calls must be all there and ended."""
        episode = self._episodes.pop(episode_id, _Episode())
        if episode.num_calls != expected_calls:
            self._tell(f"{episode_id}: {episode.num_calls} calls recorded, {expected_calls} were sent")
        for invocation_id in [name for name, call in self._open.items() if call.episode_id == episode_id]:
            del self._open[invocation_id]
            self._tell(f"{invocation_id}: never ended")

    def _tell(self, problem: str) -> None:
        self.problems.append(problem)
