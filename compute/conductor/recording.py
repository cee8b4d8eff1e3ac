"""From an ended episode attempt to the records of the graph: episode, invocations, edges, token segments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.messages import message_records
from megloom.compute.graph.records import (
    EdgeKind,
    EdgeRecord,
    EpisodeRecord,
    FieldRecord,
    InvocationRecord,
    RewardStatus,
)
from megloom.compute.graph.states import EpisodeState, InvocationState, checked_move
from megloom.compute.graph.token_paths import TokenPaths, completion_segment_id
from megloom.compute.rollout.protocol import CallScore, EpisodeOutcome

LEAF_CLASS = "leaf_class"  # the field that keeps a call's leaf class, where it is not the usual one


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Which attempt of which episode the records are of. Times are the session's clock."""

    run: str
    step: int
    purpose: str
    group_id: str
    task_id: str
    member: int
    attempt: int
    reward_hash: str
    started_s: float
    finished_s: float


def episode_records(of: Attempt, outcome: EpisodeOutcome, vertices: list[Vertex]) -> Iterator[Any]:
    """Every record of one ended attempt; the episode itself comes last, so that it stands for all of them."""
    state = checked_move(outcome.episode_id, EpisodeState.RUNNING, EpisodeState(outcome.state))
    scores = {call.invocation_id: call for call in outcome.calls}
    paths = TokenPaths(run=of.run, step=of.step)
    messages = message_records(
        {vertex.invocation_id: vertex.messages for vertex in vertices},
        episode_id=outcome.episode_id,
        run=of.run,
        step=of.step,
    )
    yield from messages.records
    for vertex in vertices:
        paths.add(vertex)
        yield _invocation(
            of,
            vertex,
            state,
            scores.get(vertex.invocation_id),
            prompt_segment=paths.prompt_segment(vertex.invocation_id),
            message=messages.last.get(vertex.invocation_id),
        )
        if vertex.leaf_class != "main":
            yield _leaf_class(of, vertex)
    yield from paths.segments
    extends = [(parent, child, EdgeKind.EXTENDS) for parent, child in paths.extends]
    waited = [(parent, vertex.invocation_id, kind) for vertex in vertices for parent, kind in vertex.parents]
    for parent, child, kind in [*waited, *extends]:
        yield EdgeRecord(
            episode_id=outcome.episode_id,
            run=of.run,
            step=of.step,
            parent=parent,
            child=child,
            kind=kind.value,
        )
    yield EpisodeRecord(
        episode_id=outcome.episode_id,
        group_id=of.group_id,
        run=of.run,
        step=of.step,
        task_id=of.task_id,
        purpose=of.purpose,
        member=of.member,
        attempt=of.attempt,
        state=state.value,
        reward=outcome.reward,
        reward_status=_status(state).value,
        reward_hash=of.reward_hash,
        metrics=json.dumps(outcome.metrics, sort_keys=True),
        failure=outcome.failure,
        failure_boundary=outcome.boundary,
        started_s=of.started_s,
        finished_s=of.finished_s,
    )


def with_gateway_calls(
    outcome: EpisodeOutcome, vertices: Sequence[Vertex], ids: frozenset[str], warnings: tuple[str, ...]
) -> EpisodeOutcome:
    """The outcome with scores for the calls `ids`, which came through the gateway and which no worker knows.

    Each gets its agent's reward, else the team's; none if it may not be trained on. A scored episode without
    any answered call is a failure of what should have made one: there is nothing that the score is of.
    """
    outcome = replace(outcome, warnings=(*outcome.warnings, *warnings))
    answered = [vertex for vertex in vertices if vertex.state is InvocationState.DONE]
    is_scored = outcome.state == EpisodeState.SCORED.value
    if is_scored and not answered:
        return replace(
            outcome,
            state=EpisodeState.FAILED.value,
            reward=None,
            calls=(),
            failure=f"no call ended with an answer{f'; {outcome.failure}' if outcome.failure else ''}",
            boundary=outcome.boundary or "workflow",
        )
    known = {call.invocation_id for call in outcome.calls}
    more = [
        CallScore(
            invocation_id=vertex.invocation_id,
            text=vertex.text,
            reward=outcome.agent_rewards.get(vertex.agent, outcome.reward)
            if is_scored and vertex.unusable is None
            else None,
            is_inherited=True,
        )
        for vertex in answered
        if vertex.invocation_id in ids and vertex.invocation_id not in known
    ]
    return replace(outcome, calls=(*outcome.calls, *more))


def _leaf_class(of: Attempt, vertex: Vertex) -> FieldRecord:
    return FieldRecord(
        invocation_id=vertex.invocation_id,
        run=of.run,
        step=of.step,
        agent=vertex.agent,
        name=LEAF_CLASS,
        is_ready=True,
        value=json.dumps(vertex.leaf_class),
        segment=None,
        values=None,
        source="gateway",
        ready_s=vertex.finished_s,
    )


def _status(state: EpisodeState) -> RewardStatus:
    if state is EpisodeState.SCORED:
        return RewardStatus.SCORED
    return RewardStatus.UNSCORABLE if state is EpisodeState.UNSCORABLE else RewardStatus.INFRASTRUCTURE


def _call_status(state: EpisodeState, score: CallScore | None) -> RewardStatus:
    if state is not EpisodeState.SCORED:
        return _status(state)
    if score is None or score.reward is None:
        return RewardStatus.UNSCORABLE
    return RewardStatus.INHERITED if score.is_inherited else RewardStatus.SCORED


def _invocation(
    of: Attempt,
    vertex: Vertex,
    state: EpisodeState,
    score: CallScore | None,
    *,
    prompt_segment: str | None,
    message: str | None,
) -> InvocationRecord:
    versions = [span[0] for span in vertex.version_spans]
    reward = score.reward if score else None
    return InvocationRecord(
        invocation_id=vertex.invocation_id,
        episode_id=vertex.episode_id,
        run=of.run,
        step=of.step,
        task_id=of.task_id,
        group_id=of.group_id,
        member=of.member,
        attempt=of.attempt,
        agent=vertex.agent,
        policy=vertex.policy,
        index=vertex.index,
        num_reentries=vertex.num_reentries,
        state=vertex.state.value,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        cell=vertex.cell,
        engine=vertex.engine,
        registered_s=vertex.registered_s,
        ready_s=vertex.ready_s,
        started_s=vertex.started_s,
        finished_s=vertex.finished_s,
        prompt_segment=prompt_segment,
        completion_segment=completion_segment_id(vertex.invocation_id)
        if vertex.state is InvocationState.DONE
        else None,
        message=message,
        num_prompt_tokens=len(vertex.prompt_ids or ()),
        num_completion_tokens=len(vertex.token_ids),
        finish_reason=vertex.finish_reason,
        seed=vertex.seed,
        temperature=vertex.temperature,
        max_tokens=vertex.max_tokens,
        text=score.text if score else vertex.text,
        reward=reward,
        reward_status=_call_status(state, score).value,
        failure=vertex.failure or vertex.unusable,
    )
