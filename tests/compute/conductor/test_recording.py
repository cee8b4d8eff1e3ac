"""What a gateway's calls leave in the records, and what a resumed session reads back from them."""

from __future__ import annotations

import json
from typing import Any

from megloom.compute.conductor.episodes import EndedEpisode, Episode
from megloom.compute.conductor.recording import Attempt, episode_records, with_gateway_calls
from megloom.compute.conductor.restoring import ended_episodes
from megloom.compute.conductor.samples import candidates
from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.records import EdgeKind, FieldRecord, InvocationRecord
from megloom.compute.graph.states import InvocationState
from megloom.compute.rollout.protocol import CallScore, EpisodeOutcome

EPISODE = "g000001-0000-m000"
ATTEMPT = Attempt(
    run="r", step=1, purpose="train", group_id="g000001-0000", task_id="t", member=0, attempt=0,
    reward_hash="h", started_s=0.0, finished_s=2.0,
)  # fmt: skip


def vertex(index: int, agent: str = "coder", **changes: Any) -> Vertex:
    values: dict[str, Any] = {
        "invocation_id": f"{EPISODE}-a0-g{index:03d}",
        "episode_id": EPISODE,
        "agent": agent,
        "policy": "p",
        "index": index,
        "parents": (),
        "registered_s": 0.0,
        "seed": 1,
        "temperature": 1.0,
        "max_tokens": 8,
        "state": InvocationState.DONE,
        "prompt_ids": (1, 2, index),
        "token_ids": (7, 8),
        "logprobs": (-0.5, -0.25),
        "version_spans": ((3, 0, 2),),
        "finish_reason": "stop",
        "finished_s": 1.5,
        "text": f"text {index}",
    }
    return Vertex(**values | changes)


def outcome(**changes: Any) -> EpisodeOutcome:
    values: dict[str, Any] = {"episode_id": EPISODE, "state": "scored", "reward": 0.5, "calls": ()}
    return EpisodeOutcome(**values | changes)


def scored(of: EpisodeOutcome, vertices: list[Vertex], *warnings: str) -> EpisodeOutcome:
    return with_gateway_calls(of, vertices, frozenset(v.invocation_id for v in vertices), warnings)


def rewards(of: EpisodeOutcome) -> list[float | None]:
    return [call.reward for call in of.calls]


def test_a_call_gets_its_agents_reward_or_the_teams_and_keeps_what_the_worker_said() -> None:
    vertices = [vertex(0), vertex(1, "judge"), vertex(2)]
    said = CallScore(invocation_id=vertices[2].invocation_id, text="said", reward=0.75)
    result = scored(outcome(agent_rewards={"judge": 0.25}, calls=(said,)), vertices, "gateway: 1 late")
    assert rewards(result) == [0.75, 0.5, 0.25]
    assert [call.text for call in result.calls] == ["said", "text 0", "text 1"]
    assert result.warnings == ("gateway: 1 late",)


def test_calls_of_the_workflow_and_calls_without_an_answer_get_nothing_here() -> None:
    mine, failed = vertex(0), vertex(1, state=InvocationState.FAILED)
    result = with_gateway_calls(outcome(), [mine, failed], frozenset({failed.invocation_id}), ())
    assert result.calls == ()


def test_a_failed_episode_keeps_its_calls_without_a_reward() -> None:
    result = scored(outcome(state="failed", reward=None, failure="x", boundary="workflow"), [vertex(0)])
    assert (rewards(result), result.failure) == ([None], "x")


def test_a_score_of_nothing_is_no_score() -> None:
    result = scored(outcome(), [vertex(0, state=InvocationState.FAILED)])
    assert (result.state, result.reward, result.boundary) == ("failed", None, "workflow")
    cut = scored(outcome(failure="not finished within 3 s", boundary="deadline"), [])
    assert (cut.boundary, cut.failure) == (
        "deadline", "no call ended with an answer; not finished within 3 s"
    )  # fmt: skip


def test_an_unusable_call_is_recorded_unscorable_and_is_no_candidate() -> None:
    vertices = [vertex(0), vertex(1, unusable="its text has a stop word in it")]
    result = scored(outcome(), vertices)
    calls = [r for r in episode_records(ATTEMPT, result, vertices) if isinstance(r, InvocationRecord)]
    assert [(c.reward, c.reward_status) for c in calls] == [(0.5, "inherited"), (None, "unscorable")]
    assert calls[1].failure == "its text has a stop word in it" and calls[1].completion_segment is not None
    episode = Episode(
        episode_id=EPISODE, group_id="g", task_id="t", split="train", purpose="train", step=1, epoch=0,
        member=0,
    )  # fmt: skip
    ended = EndedEpisode(episode=episode, outcome=result, vertices=vertices)
    assert [candidate.vertex.index for candidate in candidates(ended)] == [0]


def test_a_leaf_class_is_a_field_where_it_is_not_the_usual_one() -> None:
    vertices = [vertex(0), vertex(1, leaf_class="sub-agent")]
    records = episode_records(ATTEMPT, scored(outcome(), vertices), vertices)
    (field,) = [record for record in records if isinstance(record, FieldRecord)]
    assert (field.invocation_id, json.loads(field.value or "")) == (vertices[1].invocation_id, "sub-agent")


def test_what_was_recorded_is_read_back_for_a_resumed_session() -> None:
    parent = vertex(0)
    vertices = [
        parent,
        vertex(
            1,
            prompt_ids=(1, 2, 0, 7, 8, 5),
            parents=((parent.invocation_id, EdgeKind.ORDER),),
            leaf_class="main-summary",
            unusable="why not",
        ),
        vertex(2, state=InvocationState.FAILED, failure="no place", token_ids=(), logprobs=(), text="",
               version_spans=(), finish_reason=None),
    ]  # fmt: skip
    before = scored(outcome(failure="cut", boundary="deadline"), vertices)
    records = list(episode_records(ATTEMPT, before, vertices))
    after = ended_episodes(records, step=1, versions={"p": 3}, needs={"p": ()})[EPISODE]
    assert after.vertices == vertices
    assert (after.outcome.calls, after.outcome.failure) == (before.calls, "cut")


def test_an_attempt_whose_gateway_was_lost_is_not_over() -> None:
    lost = outcome(state="failed", reward=None, failure="killed", boundary="gateway")
    records = list(episode_records(ATTEMPT, lost, []))
    assert ended_episodes(records, step=1, versions={"p": 3}, needs={}) == {}
