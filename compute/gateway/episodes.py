"""The episode attempts that may call, and what is kept of each: histories, counts, live requests.

An episode is admitted, and closed by the conductor or at the end of its lifetime, for a conductor that has
given up waiting may never close it. Of a closed one only its token and counts stay, so that latecomers are
told and counted. The event loop's thread is the only writer.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megloom.compute.gateway.dialects.errors import CallError, ErrorKind
from megloom.compute.gateway.history import History
from megloom.compute.gateway.leaf_classes import CLASSIFIERS
from megloom.compute.gateway.protocol import Admission, AgentRoute, EpisodeCounts

log = logging.getLogger(__name__)
DRAIN_S = 10.0  # for the answers of stopped calls to reach the conductor; nothing else takes time
_MAX_CLOSED = 10_000  # latecomers of older episodes are told that they are unknown; each costs 300 bytes
_MAX_PROBLEMS = 32  # different ones; a harness that sends garbage must not fill a report


class LiveRequest:
    """A request in flight, the current task's. `cause` says why it was stopped."""

    def __init__(self, episode: Episode, task: asyncio.Task[object]) -> None:
        self.episode, self.task = episode, task
        self.cause: CallError | None = None

    def stop(self, cause: CallError) -> None:
        """Cancels the request; the first cause stands."""
        if self.cause is None:
            self.cause = cause
            self.task.cancel()

    def take_back(self) -> None:
        """The request has noticed that it was stopped: it answers its client, and its task goes on."""
        self.task.uncancel()


class Episode:
    """An admitted episode attempt."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.classifier = CLASSIFIERS[admission.leaf_classes]()
        self.histories: dict[str, History] = {}
        self.locks: dict[str, asyncio.Lock] = {}  # of histories that a thread works on
        self.live: set[LiveRequest] = set()
        self.is_over = False
        self.num_calls = self.num_failed = self.num_unusable = self.num_branches = self.late = 0
        self.num_classified = 0
        self._num_ids = 0
        self._problems: dict[str, None] = {}

    def route(self, agent: str) -> AgentRoute:
        """How the agent is sampled. Raises: CallError if the episode has no such agent."""
        route = self.admission.agents.get(agent)
        if route is None:
            episode_id, known = self.admission.episode_id, ", ".join(sorted(self.admission.agents))
            message = f"the model {agent[:80]!r} does not exist: episode {episode_id} has the agents {known}"
            raise CallError(ErrorKind.UNKNOWN_AGENT, message, param="model")
        return route

    def new_call(self) -> tuple[int, str]:
        """The index and invocation id of the next call; both follow the order in which requests came."""
        index = self._num_ids
        self._num_ids += 1
        return index, f"{self.admission.episode_id}-a{self.admission.attempt}-g{index:03d}"

    def note(self, problem: str) -> bool:
        """Keeps a problem for the episode's counts, once. False if it is known or there are too many."""
        if problem in self._problems or len(self._problems) >= _MAX_PROBLEMS:
            return False
        self._problems[problem] = None
        return True

    @contextmanager
    def request(self) -> Iterator[LiveRequest]:
        """The current task's request, live inside the block."""
        task = asyncio.current_task()
        assert task is not None
        live = LiveRequest(self, task)
        self.live.add(live)
        try:
            yield live
        finally:
            self.live.discard(live)

    def end(self, why: str) -> None:
        """The episode is over: live requests are stopped, later ones are late."""
        self.is_over = True
        for live in tuple(self.live):
            live.stop(self.over(why))

    def over(self, why: str = "it is over") -> CallError:
        """What a request of an episode that is over gets."""
        admission = self.admission
        return CallError(ErrorKind.OVER, f"episode {admission.episode_id} attempt {admission.attempt}: {why}")

    def counts(self) -> EpisodeCounts:
        """The counts until now."""
        return EpisodeCounts(
            num_calls=self.num_calls,
            num_failed=self.num_failed,
            num_unusable=self.num_unusable,
            num_branches=self.num_branches,
            late=self.late,
            problems=tuple(self._problems),
        )


@dataclass(kw_only=True, slots=True)
class _Closed:
    """What stays of a closed episode attempt. `late` grows."""

    run: str
    token: bytes
    counts: EpisodeCounts
    late: int


class Episodes:
    """All episode attempts of one gateway."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], tuple[Episode, asyncio.TimerHandle]] = {}
        self._closed: OrderedDict[tuple[str, int], _Closed] = OrderedDict()
        self._expiring: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_live(self) -> int:
        """Requests in flight, over all episodes."""
        return sum(len(episode.live) for episode, _ in self._open.values())

    def admit(self, admission: Admission) -> Episode:
        """The episode may call from now on.

        Raises: ValueError if it was admitted before, has no token, or names an unknown classifier.
        """
        key = (admission.episode_id, admission.attempt)
        where = f"episode {key[0]} attempt {key[1]}"
        if not admission.token:
            raise ValueError(f"{where}: expected a token, got an empty one")
        if key in self._open or key in self._closed:
            raise ValueError(f"{where} was admitted before; a retry is a new attempt")
        if admission.leaf_classes not in CLASSIFIERS:
            known = ", ".join(CLASSIFIERS)
            raise ValueError(
                f"{where}: leaf_classes: expected one of {known}, got {admission.leaf_classes!r}"
            )
        episode = Episode(admission)
        timer = asyncio.get_running_loop().call_later(admission.lifetime_s, self._expire, key)
        self._open[key] = (episode, timer)
        return episode

    def find(self, run: str, episode_id: str, attempt: int, token: bytes) -> Episode | None:
        """The episode that a request belongs to; None if it does not exist or the token is another's.

        Raises: CallError if the episode is over.
        """
        if found := self._open.get((episode_id, attempt)):
            episode, _ = found
            admission = episode.admission
            if admission.run != run or not hmac.compare_digest(admission.token.encode(), token):
                return None
            if episode.is_over:
                episode.late += 1
                raise episode.over()
            return episode
        closed = self._closed.get((episode_id, attempt))
        if closed is not None and closed.run == run and hmac.compare_digest(closed.token, token):
            closed.late += 1
            raise CallError(ErrorKind.OVER, f"episode {episode_id} attempt {attempt}: it is over")
        return None

    async def close(self, episode_id: str, attempt: int) -> EpisodeCounts:
        """Stops its live requests, waits for their ends, and forgets it. Closing again is harmless."""
        key = (episode_id, attempt)
        await self._end(key, "it was closed")
        return self._closed_counts(key)

    def _expire(self, key: tuple[str, int]) -> None:
        """Closes an episode whose lifetime has ended."""
        why = f"its lifetime of {self._open[key][0].admission.lifetime_s:g} s has ended"
        task = asyncio.ensure_future(self._end(key, why))
        self._expiring.add(task)
        task.add_done_callback(self._expiring.discard)

    async def _end(self, key: tuple[str, int], why: str) -> None:
        if (found := self._open.get(key)) is None:
            return
        episode, timer = found
        timer.cancel()
        episode.end(why)
        await _drain(episode)
        if self._open.pop(key, None) is not None:
            self._closed[key] = _Closed(
                run=episode.admission.run,
                token=episode.admission.token.encode(),
                counts=episode.counts(),
                late=episode.late,
            )
            episode.histories.clear()
            while len(self._closed) > _MAX_CLOSED:
                self._closed.popitem(last=False)

    def _closed_counts(self, key: tuple[str, int]) -> EpisodeCounts:
        if closed := self._closed.get(key):
            return replace(closed.counts, late=closed.late)
        unknown = f"episode {key[0]} attempt {key[1]} was not admitted here, or was closed long ago"
        return EpisodeCounts(
            num_calls=0, num_failed=0, num_unusable=0, num_branches=0, late=0, problems=(unknown,)
        )


async def _drain(episode: Episode) -> None:
    """Waits until the stopped requests have ended; what does not end in time is a noted problem."""
    tasks = {live.task for live in episode.live}
    if not tasks:
        return
    _, pending = await asyncio.wait(tasks, timeout=DRAIN_S)
    if pending:
        problem = f"{len(pending)} requests had not ended {DRAIN_S:g} s after the episode was closed"
        episode.note(problem)
        log.warning("episode=%s: %s", episode.admission.episode_id, problem)
