"""Episodes are admitted, end at their deadline or closing, and leave their counts."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from megloom.compute.gateway import episodes as module
from megloom.compute.gateway.dialects.errors import CallError, ErrorKind
from megloom.compute.gateway.episodes import Episode, Episodes
from tests.compute.gateway.fakes import admission

TOKEN = b"secret-of-g000000-0000-m000"
WHO = ("r", "g000000-0000-m000", 0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


async def hang(episode: Episode, *, until: asyncio.Event | None = None) -> CallError:
    """A request that waits until it is stopped; returns why."""
    with episode.request() as live:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert live.cause is not None
            live.take_back()
            if until is not None:
                await until.wait()
            return live.cause
    raise AssertionError


def test_an_admitted_episode_is_found_by_its_token_only() -> None:
    async def scenario() -> None:
        episodes = Episodes()
        episode = episodes.admit(admission())
        assert episodes.find(*WHO, TOKEN) is episode and len(episodes) == 1
        assert episodes.find(*WHO, b"other") is None
        assert episodes.find(*WHO, b"") is None
        assert episodes.find("q", *WHO[1:], TOKEN) is None
        assert episodes.find(*WHO[:2], 1, TOKEN) is None
        await episodes.close(*WHO[1:])

    run(scenario)


def test_an_episode_is_over_at_its_deadline_and_latecomers_are_counted() -> None:
    async def scenario() -> None:
        episodes = Episodes()
        episode = episodes.admit(admission(lifetime_s=0.0))
        request = asyncio.create_task(hang(episode))
        cause = await request
        assert cause.kind is ErrorKind.OVER and "lifetime of 0 s" in cause.message
        for _ in range(2):
            with pytest.raises(CallError, match="it is over"):
                episodes.find(*WHO, TOKEN)
        assert episodes.find(*WHO, b"other") is None  # a stranger learns nothing and is not late
        assert (await episodes.close(*WHO[1:])).late == 2

    run(scenario)


def test_an_episode_that_nobody_closes_is_dropped_when_its_lifetime_ends() -> None:
    async def scenario() -> None:
        episodes = Episodes()
        episode = episodes.admit(admission(lifetime_s=0.01))
        episode.num_calls, gate = 2, asyncio.Event()
        gone = weakref.ref(episode)
        request = asyncio.create_task(hang(episode, until=gate))
        del episode
        await asyncio.sleep(0.05)
        assert (len(episodes), episodes.num_live) == (1, 1)  # its request has still to be ended
        gate.set()
        assert (await request).kind is ErrorKind.OVER
        del request
        async with asyncio.timeout(10):
            while len(episodes):  # noqa: ASYNC110 - what is waited for is a fact, not an event
                await asyncio.sleep(0)
        assert (len(episodes), episodes.num_live) == (0, 0)
        await asyncio.sleep(0)
        gc.collect()
        assert gone() is None
        with pytest.raises(CallError, match="it is over"):
            episodes.find(*WHO, TOKEN)
        with pytest.raises(ValueError, match="was admitted before"):
            episodes.admit(admission())
        counts = await episodes.close(*WHO[1:])  # by a conductor that learns of it after all
        assert (counts.num_calls, counts.late, counts.problems) == (2, 1, ())

    run(scenario)


def test_closing_at_the_end_of_a_lifetime_waits_for_the_same_requests() -> None:
    async def scenario() -> None:
        episodes = Episodes()
        episode = episodes.admit(admission(lifetime_s=0.0))
        gate = asyncio.Event()
        request = asyncio.create_task(hang(episode, until=gate))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(episodes.close(*WHO[1:]))
        await asyncio.sleep(0.01)
        assert not closing.done() and episodes.num_live == 1
        gate.set()
        assert (await closing).problems == () and "lifetime of 0 s" in (await request).message
        assert (len(episodes), episodes.num_live) == (0, 0)

    run(scenario)


def test_closing_stops_requests_in_flight_and_waits_for_their_end() -> None:
    async def scenario() -> None:
        episodes = Episodes()
        episode = episodes.admit(admission())
        gate = asyncio.Event()
        requests = [asyncio.create_task(hang(episode, until=gate)) for _ in range(3)]
        await asyncio.sleep(0)
        assert episodes.num_live == 3
        closing = asyncio.create_task(episodes.close(*WHO[1:]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not closing.done()
        gate.set()
        await closing
        assert [(await request).kind for request in requests] == [ErrorKind.OVER] * 3
        assert episodes.num_live == 0 and len(episodes) == 0

    run(scenario)


def test_a_closed_episode_counts_latecomers_and_is_forgotten_but_for_its_counts() -> None:
    async def scenario() -> None:
        episodes = Episodes()
        episode = episodes.admit(admission())
        episode.num_calls, episode.num_failed = 5, 2
        assert episode.note("odd") and not episode.note("odd")
        gone = weakref.ref(episode)
        del episode
        counts = await episodes.close(*WHO[1:])
        assert (counts.num_calls, counts.num_failed, counts.late, counts.problems) == (5, 2, 0, ("odd",))
        gc.collect()
        assert gone() is None
        with pytest.raises(CallError) as caught:
            episodes.find(*WHO, TOKEN)
        assert caught.value.kind is ErrorKind.OVER
        assert (await episodes.close(*WHO[1:])).late == 1

    run(scenario)


def test_closing_what_was_never_admitted_says_so_in_its_counts() -> None:
    async def scenario() -> None:
        counts = await Episodes().close("g000000-0000-m009", 2)
        assert counts.num_calls == 0
        assert counts.problems == (
            "episode g000000-0000-m009 attempt 2 was not admitted here, or was closed long ago",
        )

    run(scenario)


def test_only_so_many_closed_episodes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(module, "_MAX_CLOSED", 2)
        episodes = Episodes()
        for attempt in range(3):
            episodes.admit(admission(attempt=attempt))
            await episodes.close(WHO[1], attempt)
        assert episodes.find(*WHO[:2], 0, TOKEN) is None  # unknown again
        for attempt in (1, 2):
            with pytest.raises(CallError):
                episodes.find(*WHO[:2], attempt, TOKEN)

    run(scenario)


def test_an_attempt_is_admitted_once_with_a_token_and_a_known_classifier() -> None:
    async def scenario() -> None:
        episodes = Episodes()
        episodes.admit(admission())
        with pytest.raises(ValueError, match="attempt 0 was admitted before"):
            episodes.admit(admission())
        await episodes.close(*WHO[1:])
        with pytest.raises(ValueError, match="attempt 0 was admitted before"):
            episodes.admit(admission())
        with pytest.raises(ValueError, match="expected a token, got an empty one"):
            episodes.admit(admission(attempt=1, token=""))
        with pytest.raises(ValueError, match="expected one of all_main, coding_harness, got 'x'"):
            episodes.admit(admission(attempt=1, leaf_classes="x"))

    run(scenario)


def test_problems_are_kept_once_each_and_only_so_many() -> None:
    async def scenario() -> None:
        episode = Episode(admission())
        assert sum(episode.note(f"problem {number % 50}") for number in range(100)) == 32
        assert len(episode.counts().problems) == 32

    run(scenario)


def test_an_unknown_agent_is_refused_with_the_known_ones() -> None:
    async def scenario() -> None:
        with pytest.raises(CallError, match="has the agents coder, judge") as caught:
            Episode(admission()).route("painter")
        assert caught.value.kind is ErrorKind.UNKNOWN_AGENT

    run(scenario)


def test_a_request_that_does_not_end_is_named_in_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(module, "DRAIN_S", 0.0)
        episodes = Episodes()
        episode = episodes.admit(admission())
        gate = asyncio.Event()
        request = asyncio.create_task(hang(episode, until=gate))
        await asyncio.sleep(0)
        counts = await episodes.close(*WHO[1:])
        assert counts.problems == ("1 requests had not ended 0 s after the episode was closed",)
        gate.set()
        await request

    run(scenario)
