"""One episode attempt: whatever user code does, the outcome is data."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from megloom.compute.rollout.episode import run_episode
from megloom.compute.rollout.protocol import EpisodeOutcome
from megloom.compute.workload import Score

from .builders import ORDER, RecordedEvents, answer, book, workload

TASK = SimpleNamespace(task_id="t", prompt="1+2", ground_truth="3", row={})


def outcome_of(*, text: str = "3", failure: str | None = None, **overrides: Any) -> EpisodeOutcome:
    """Runs an episode whose calls are all answered with `text`."""

    async def body() -> EpisodeOutcome:
        events = RecordedEvents()
        calls = book(events)
        running = asyncio.create_task(run_episode(workload(**overrides), TASK, ORDER, calls))
        answered = 0
        while not running.done():
            await asyncio.sleep(0)
            for opened in events.opened[answered:]:
                calls.receive(answer(opened.invocation_id, text, failure=failure))
                answered += 1
        return running.result()

    return asyncio.run(body())


def test_a_scored_episode_has_a_value_for_every_call() -> None:
    outcome = outcome_of(reward=lambda task, episode: float(episode.result.text == task.ground_truth))
    assert outcome.state == "scored" and outcome.reward == 1.0
    assert [(call.text, call.reward) for call in outcome.calls] == [("3", 1.0)]


def test_metrics_of_a_score_are_kept_as_sums_and_counts() -> None:
    outcome = outcome_of(reward=lambda t, e: Score(team=0.0, metrics={"planner/well_formed": (1.0, 1)}))
    assert outcome.metrics == {"planner/well_formed": (1.0, 1)}


def test_a_workflow_that_raises_is_a_failed_episode_with_the_place() -> None:
    async def broken(task: Any, team: Any) -> Any:
        raise ZeroDivisionError("no")

    outcome = outcome_of(workflow=broken)
    assert (outcome.state, outcome.boundary) == ("failed", "workflow")
    assert outcome.failure is not None and "ZeroDivisionError: no at test_episode.py" in outcome.failure


def test_an_unknown_agent_is_a_failed_episode_that_names_the_nearest() -> None:
    async def wrong(task: Any, team: Any) -> Any:
        return await team.plannr(task.prompt)

    outcome = outcome_of(workflow=wrong)
    assert outcome.failure is not None and "did you mean 'planner'" in outcome.failure


def test_a_reward_that_raises_is_unscorable_and_never_zero() -> None:
    def broken(task: Any, episode: Any) -> float:
        raise TypeError("no verdict")

    outcome = outcome_of(reward=broken)
    assert (outcome.state, outcome.boundary, outcome.reward) == ("unscorable", "reward", None)
    assert outcome.calls[0].reward is None


def test_a_failed_call_that_the_workflow_does_not_catch_fails_the_episode_at_the_engine() -> None:
    outcome = outcome_of(failure="no engine left")
    assert (outcome.state, outcome.boundary) == ("failed", "engine")


def test_a_workflow_may_survive_a_failed_call() -> None:
    async def survives(task: Any, team: Any) -> Any:
        try:
            await team.solver("a")
        except Exception:
            return "given up"

    outcome = outcome_of(workflow=survives, failure="no engine left")
    assert (outcome.state, outcome.boundary) == ("failed", "workflow")  # there is nothing to evaluate


def test_an_empty_answer_is_scored_by_the_workload_like_any_other() -> None:
    outcome = outcome_of(text="", reward=lambda task, episode: float(bool(episode.result.text)))
    assert (outcome.state, outcome.reward) == ("scored", 0.0)


def test_a_failure_that_quotes_a_lone_surrogate_is_valid_unicode_for_the_wire() -> None:
    async def broken(task: Any, team: Any) -> Any:
        raise ValueError("a \ud800 in it")

    failure = outcome_of(workflow=broken).failure
    assert failure is not None and "a \ufffd in it" in failure
