"""From groups to training rows: grouping by (task, agent), unusable members out first, exact weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.conductor.episodes import EndedEpisode, Episode
from megloom.compute.conductor.samples import Aggregation, Sample, candidates, policy_samples
from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.training_view import Candidate, FieldValue
from megloom.compute.rollout.protocol import CallScore, EpisodeOutcome


def vertex(name: str, agent: str, num_tokens: int = 3) -> Vertex:
    return Vertex(
        invocation_id=name,
        episode_id=name.rpartition("-a")[0],
        agent=agent,
        policy=agent,
        index=0,
        parents=(),
        registered_s=0.0,
        seed=0,
        temperature=0.7,
        max_tokens=8,
        state=InvocationState.DONE,
        prompt_ids=(1, 2),
        token_ids=tuple(range(10, 10 + num_tokens)),
        logprobs=tuple(-0.5 for _ in range(num_tokens)),
        version_spans=((4, 0, num_tokens),),
    )


def member(number: int, planner: float | None, *solvers: float | None, state: str = "scored") -> EndedEpisode:
    episode = Episode(
        episode_id=f"g-m{number}", group_id="g", task_id="t", split="train", purpose="train", step=1, epoch=0,
        member=number,
    )  # fmt: skip
    rewards = [("planner", planner), *(("solver", reward) for reward in solvers)]
    vertices = [vertex(f"g-m{number}-a0-i{n}", agent, 3 + n) for n, (agent, _) in enumerate(rewards)]
    calls = tuple(
        CallScore(invocation_id=v.invocation_id, text="", reward=reward)
        for v, (_, reward) in zip(vertices, rewards, strict=True)
    )
    outcome = EpisodeOutcome(episode_id=f"g-m{number}", state=state, reward=1.0, calls=calls)
    return EndedEpisode(episode=episode, outcome=outcome, vertices=vertices)


def samples_of(*members: EndedEpisode, **policies: Any) -> dict[str, list[Sample]]:
    estimators = policies or {"planner": Grpo().advantages, "solver": Grpo().advantages}
    calls = [call for member in members for call in candidates(member)]
    return {
        policy: policy_samples(
            run="r",
            step=1,
            group_id="g",
            task_id="t",
            calls=[call for call in calls if call.vertex.policy == policy],
            estimate=estimate,
            seed=0,
            max_paths=5,
        )
        for policy, estimate in estimators.items()
    }


def advantages(samples: list[Sample]) -> list[float]:
    """In the order of the calls: the draw of an episode's paths has one of its own."""
    return [round(s.record.advantage, 3) for s in sorted(samples, key=lambda s: s.record.sample_id)]


def test_every_agent_has_its_own_baseline_over_all_its_calls_in_the_group() -> None:
    samples = samples_of(member(0, 100.0, 1.0, 0.0), member(1, 300.0, 1.0, 0.0))
    assert advantages(samples["planner"]) == [-0.707, 0.707]
    assert advantages(samples["solver"]) == [0.866, -0.866, 0.866, -0.866]


def test_the_scale_of_one_agents_reward_does_not_touch_another() -> None:
    small = samples_of(member(0, 1.0, 1.0), member(1, 0.0, 0.0))
    large = samples_of(member(0, 100.0, 1.0), member(1, 0.0, 0.0))
    assert [s.record.advantage for s in small["solver"]] == [s.record.advantage for s in large["solver"]]


def test_unscored_members_leave_before_the_statistics() -> None:
    with_failure = samples_of(member(0, 1.0), member(1, 0.0), member(2, None), member(3, 5.0, state="failed"))
    without = samples_of(member(0, 1.0), member(1, 0.0))
    assert [s.record.advantage for s in with_failure["planner"]] == [
        s.record.advantage for s in without["planner"]
    ]


def test_a_group_without_a_signal_is_recorded_as_dropped_and_not_sent() -> None:
    samples = samples_of(member(0, 1.0), member(1, 1.0))["planner"]
    assert [s.record.state for s in samples] == ["dropped", "dropped"] and all(s.row is None for s in samples)


def test_a_single_scored_member_has_no_advantage() -> None:
    (sample,) = samples_of(member(0, 1.0), member(1, None))["planner"]
    assert sample.row is None


def test_a_reward_field_stands_for_the_reward_and_calls_without_it_leave_first() -> None:
    calls = [call for number in range(3) for call in candidates(member(number, 5.0))]
    for call, judged in zip(calls, (1.0, 0.0, None), strict=True):
        if judged is not None:
            call.vertex.fields["judge"] = FieldValue(value=judged, source="judge", ready_s=1.0)
    samples = policy_samples(
        run="r", step=1, group_id="g", task_id="t", calls=calls, estimate=Grpo().advantages,
        reward_field="judge",
        seed=0,
        max_paths=None,
    )  # fmt: skip
    assert [s.record.reward for s in samples] == [1.0, 0.0]
    assert [round(s.record.advantage, 3) for s in samples] == [0.707, -0.707]


def test_a_row_holds_the_path_with_its_mask_logprobs_and_temperature() -> None:
    row = samples_of(member(0, 1.0), member(1, 0.0))["planner"][0].row
    assert row is not None and row.temperature == 0.7
    assert row.token_ids.tolist() == [1, 2, 10, 11, 12] and row.loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert np.allclose(row.logprobs, [0, 0, -0.5, -0.5, -0.5])


def test_calls_that_share_their_episodes_reward_are_one_outcome_however_many_they_are() -> None:
    """Episode 0 made one call and episode 1 three: its reward must not count three times in the mean."""
    few, many = member(0, None, 1.0), member(1, None, 0.0, 0.0, 0.0)
    shared = [
        replace(call, is_inherited=True)
        for call in (*candidates(few), *candidates(many))
        if call.vertex.policy == "solver"
    ]
    samples = policy_samples(
        run="r", step=1, group_id="g", task_id="t", calls=shared, estimate=Grpo().advantages, seed=0,
        max_paths=5,
    )  # fmt: skip
    assert advantages(samples) == [0.707, -0.707, -0.707, -0.707]


def test_a_conversation_is_one_sample_that_trains_each_of_its_answers_once() -> None:
    first = vertex("g-m0-a0-i0", "solver")
    second = replace(
        vertex("g-m0-a0-i1", "solver"), prompt_ids=(*(first.prompt_ids or ()), *first.token_ids, 7)
    )
    calls = [Candidate(vertex=v, member=0, reward=1.0) for v in (first, second)]
    (sample,) = policy_samples(
        run="r", step=1, group_id="g", task_id="t", calls=calls,
        estimate=lambda rewards: [1.0] * len(rewards), seed=0, max_paths=5,
    )  # fmt: skip
    assert sample.record.invocation_ids == ["g-m0-a0-i0", "g-m0-a0-i1"]
    assert sample.row is not None and sample.row.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("max_paths", [1, 2, 3, None])
def test_an_episode_gives_at_most_so_many_paths(max_paths: int | None) -> None:
    calls = [call for call in candidates(member(0, None, 1.0, 0.0, 1.0)) if call.reward is not None]
    samples = policy_samples(
        run="r", step=1, group_id="g", task_id="t", calls=calls,
        estimate=lambda rewards: [1.0] * len(rewards), seed=0, max_paths=max_paths,
    )  # fmt: skip
    assert len(samples) == min(3, max_paths or 3)


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [
        ("token-mean", [1, 1, 1, 1], 4 + 5 + 4 + 5),
        ("seq-mean-token-mean", [1 / 4, 1 / 5, 1 / 4, 1 / 5], 4),
        ("episode-mean", [1 / 9, 1 / 9, 1 / 9, 1 / 9], 2),
    ],
)
def test_weights_and_denominator_of_each_aggregation(
    aggregation: Any, weights: list[float], denominator: int
) -> None:
    samples = samples_of(member(0, 0.0, 1.0, 0.0), member(1, 0.0, 1.0, 0.0))["solver"]
    rule = Aggregation(name=aggregation)
    weighed = rule.weigh(samples)
    in_order = sorted(weighed, key=lambda sample: sample.record.sample_id)
    assert [s.row.weight for s in in_order if s.row] == pytest.approx(weights)
    assert rule.denominator(weighed) == denominator
