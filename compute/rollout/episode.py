"""Runs one episode attempt: the user's workflow, then the user's reward. Every failure becomes an outcome.

This is the one place where an episode's failure is caught. It runs in a worker process, and unchanged in
simulation.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megloom.compute.graph.records import clean_text
from megloom.compute.graph.states import EpisodeState
from megloom.compute.rewards.scoring import RewardError, names_call, normalise
from megloom.compute.rollout.harness import Programs
from megloom.compute.rollout.protocol import CallScore, EpisodeOrder, EpisodeOutcome
from megloom.compute.rollout.team import Call, CallBook, TeamHandle
from megloom.compute.workload import CallFailed, Score, Workload

log = logging.getLogger(__name__)
CANCELLED = "cancelled by the conductor"


class Finished:
    """`megloom.compute.workload.FinishedEpisode`: the result and the calls that ended with an answer."""

    def __init__(self, result: Any, calls: Sequence[Call]) -> None:
        self.result, self.calls = result, calls

    def of(self, agent: str) -> list[Call]:
        return [call for call in self.calls if call.agent == agent]


async def run_episode(
    workload: Workload,
    task: Any,
    order: EpisodeOrder,
    book: CallBook,
    on_scored: Callable[[Finished], None] = lambda finished: None,
    programs: Programs | None = None,
) -> EpisodeOutcome:
    """Returns the attempt's outcome; raises only CancelledError. `on_scored` hears of a scored episode."""
    try:
        result = await workload.workflow(task, TeamHandle(book, programs))
        if isinstance(result, Call):
            result = await result
    except CallFailed as error:
        return _failed(order, book, EpisodeState.FAILED, "engine", str(error))
    except asyncio.CancelledError:
        raise
    except Exception as error:  # the boundary of user code: recorded once, with its place
        return _failed(order, book, EpisodeState.FAILED, "workflow", _explain(error))
    outcome = _scored(workload, task, order, book, result, on_scored)
    if programs is not None and programs.was_stopped and outcome.failure is None:
        return replace(outcome, failure="its programs were stopped at the deadline", boundary="deadline")
    return outcome


def scored_in_part(
    workload: Workload,
    task: Any,
    order: EpisodeOrder,
    book: CallBook,
    on_scored: Callable[[Finished], None],
) -> EpisodeOutcome:
    """The outcome of an attempt that was told to end: the reward function sees the calls so far, no result.

    One that cannot score them is not asked again, and says nothing of the episode.
    """
    outcome = _scored(workload, task, replace(order, reward_retries=0), book, None, on_scored)
    if outcome.state == EpisodeState.SCORED.value:
        return replace(outcome, failure=CANCELLED, boundary="deadline")
    return _failed(order, book, EpisodeState.FAILED, "deadline", f"{CANCELLED}; {outcome.failure}")


def _scored(
    workload: Workload,
    task: Any,
    order: EpisodeOrder,
    book: CallBook,
    result: Any,
    on_scored: Callable[[Finished], None],
) -> EpisodeOutcome:
    answered = [call for call in book.calls if call.is_done and not call.failed]
    if not answered and not workload.uses_gateway:
        return _failed(order, book, EpisodeState.FAILED, "workflow", "the workflow made no finished call")
    finished = Finished(result, answered)
    try:
        value = _rewarded(workload, task, finished, order.reward_retries)
        calls = {call.invocation_id: call.agent for call in answered}
        score = normalise(value, calls=calls, agents=workload.agents if workload.uses_gateway else ())
    except RewardError as error:
        return _failed(order, book, EpisodeState.UNSCORABLE, "reward", str(error))
    except Exception as error:  # the boundary of user code: no verdict is not a zero
        return _failed(order, book, EpisodeState.UNSCORABLE, "reward", _explain(error))
    on_scored(finished)
    return EpisodeOutcome(
        episode_id=order.episode_id,
        state=EpisodeState.SCORED.value,
        reward=score.team,
        calls=_calls(answered, score, value),
        metrics={name: (float(pair[0]), int(pair[1])) for name, pair in score.metrics.items()},
        warnings=tuple(book.warnings),
        agent_rewards={name: float(reward) for name, reward in score.agents.items()},
    )


def _rewarded(workload: Workload, task: Any, finished: Finished, num_retries: int) -> Any:
    """What the reward function returns; one that raises is asked again, `num_retries` times."""
    for attempt in range(num_retries + 1):
        try:
            return workload.reward(task, finished)
        except Exception as error:  # the boundary of user code: the last one is the caller's
            if attempt == num_retries:
                raise
            log.warning("task=%s: the reward function raised, asked again: %s", task.task_id, _explain(error))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _failed(
    order: EpisodeOrder, book: CallBook, state: EpisodeState, boundary: str, failure: str
) -> EpisodeOutcome:
    answered = [call for call in book.calls if call.is_done and not call.failed]
    return EpisodeOutcome(
        episode_id=order.episode_id,
        state=state.value,
        reward=None,
        calls=_calls(answered, None),
        failure=clean_text(failure),  # it may quote a dataset's lone surrogate, which the wire refuses
        boundary=boundary,
        warnings=tuple(book.warnings),
    )


def _calls(answered: Sequence[Call], score: Score | None, value: Any = None) -> tuple[CallScore, ...]:
    return tuple(
        CallScore(
            invocation_id=call.invocation_id,
            text=call.text,
            reward=score.calls[call.invocation_id] if score else None,
            is_inherited=score is not None and not names_call(value, call.invocation_id),
        )
        for call in answered
    )


def _explain(error: Exception) -> str:
    """The error and the last frame of user code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
