"""From a finished episode to the records of the graph: episode, invocations, edges, token segments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.records import (
    EdgeRecord,
    EpisodeRecord,
    InvocationRecord,
    RewardStatus,
    SegmentRecord,
)
from megloom.compute.graph.seeds import content_hash
from megloom.compute.graph.states import EpisodeState, InvocationState
from megloom.compute.rollout.protocol import CallScore, EpisodeOutcome


def prompt_segment_id(vertex: Vertex) -> str:
    """Equal prompts of one episode share a segment: three tries of one plan store it once."""
    attempt_prefix = vertex.invocation_id.rpartition("-i")[0]
    return f"{attempt_prefix}-p{content_hash(list(vertex.prompt_ids or ()))}"


def completion_segment_id(vertex: Vertex) -> str:
    return f"{vertex.invocation_id}-c"


def episode_records(
    *,
    run: str,
    step: int,
    purpose: str,
    group_id: str,
    task_id: str,
    member: int,
    attempt: int,
    reward_hash: str,
    outcome: EpisodeOutcome,
    vertices: list[Vertex],
    started_s: float,
    finished_s: float,
) -> Iterator[Any]:
    """Every record of one ended attempt."""
    state = EpisodeState(outcome.state)
    yield EpisodeRecord(
        episode_id=outcome.episode_id,
        group_id=group_id,
        run=run,
        step=step,
        task_id=task_id,
        purpose=purpose,
        member=member,
        attempt=attempt,
        state=state.value,
        reward=outcome.reward,
        reward_status=_status(state).value,
        reward_hash=reward_hash,
        metrics=json.dumps(outcome.metrics, sort_keys=True),
        failure=outcome.failure,
        failure_boundary=outcome.boundary,
        started_s=started_s,
        finished_s=finished_s,
    )
    scores = {call.invocation_id: call for call in outcome.calls}
    prompts: set[str] = set()
    for vertex in vertices:
        yield _invocation(
            run, step, vertex, state, scores.get(vertex.invocation_id), task_id, group_id, member, attempt
        )
        for parent, kind in vertex.parents:
            yield EdgeRecord(
                episode_id=vertex.episode_id,
                run=run,
                step=step,
                parent=parent,
                child=vertex.invocation_id,
                kind=str(kind),
            )
        yield from _segments(run, step, vertex, prompts)


def _status(state: EpisodeState) -> RewardStatus:
    if state is EpisodeState.SCORED:
        return RewardStatus.SCORED
    return RewardStatus.UNSCORABLE if state is EpisodeState.UNSCORABLE else RewardStatus.INFRASTRUCTURE


def _invocation(
    run: str,
    step: int,
    vertex: Vertex,
    state: EpisodeState,
    score: CallScore | None,
    task_id: str,
    group_id: str,
    member: int,
    attempt: int,
) -> InvocationRecord:
    versions = [span[0] for span in vertex.version_spans]
    done = vertex.state is InvocationState.DONE
    reward = score.reward if score else None
    status = (
        _status(state) if reward is not None or state is not EpisodeState.SCORED else RewardStatus.UNSCORABLE
    )
    return InvocationRecord(
        invocation_id=vertex.invocation_id,
        episode_id=vertex.episode_id,
        run=run,
        step=step,
        task_id=task_id,
        group_id=group_id,
        member=member,
        attempt=attempt,
        agent=vertex.agent,
        policy=vertex.policy,
        index=vertex.index,
        num_reentries=vertex.attempt,
        state=vertex.state.value,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        cell=vertex.cell,
        engine=vertex.cell,
        registered_s=vertex.registered_s,
        ready_s=vertex.ready_s,
        started_s=vertex.started_s,
        finished_s=vertex.finished_s,
        prompt_segment=prompt_segment_id(vertex) if vertex.prompt_ids is not None else None,
        completion_segment=completion_segment_id(vertex) if done else None,
        message=None,
        num_prompt_tokens=len(vertex.prompt_ids or ()),
        num_completion_tokens=len(vertex.token_ids),
        finish_reason=vertex.finish_reason,
        seed=vertex.seed,
        temperature=vertex.temperature,
        max_tokens=vertex.max_tokens,
        text=score.text if score else "",
        reward=reward,
        reward_status=status.value,
        failure=vertex.failure,
    )


def _segments(run: str, step: int, vertex: Vertex, prompts: set[str]) -> Iterator[SegmentRecord]:
    if vertex.prompt_ids is None:
        return
    prompt_id = prompt_segment_id(vertex)
    if prompt_id not in prompts:
        prompts.add(prompt_id)
        yield SegmentRecord(
            segment_id=prompt_id,
            episode_id=vertex.episode_id,
            run=run,
            step=step,
            policy=vertex.policy,
            parent=None,
            start=0,
            sampled=False,
            token_ids=list(vertex.prompt_ids),
            logprobs=None,
            version_spans=None,
        )
    if vertex.state is InvocationState.DONE:
        yield SegmentRecord(
            segment_id=completion_segment_id(vertex),
            episode_id=vertex.episode_id,
            run=run,
            step=step,
            policy=vertex.policy,
            parent=prompt_id,
            start=len(vertex.prompt_ids),
            sampled=True,
            token_ids=list(vertex.token_ids),
            logprobs=list(vertex.logprobs),
            version_spans=[list(span) for span in vertex.version_spans],
        )
