"""From groups to training rows: grouping by (task, agent), unusable members out first, exact weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megloom.compute.algorithms.base import Kl, Outcome, Overlong, PolicyGradient
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.hierarchical_grpo import HierarchicalGrpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.conductor.draws import draw_group
from megloom.compute.conductor.episodes import EndedEpisode, Episode
from megloom.compute.conductor.estimates import StepEstimates
from megloom.compute.conductor.samples import Aggregation, Sample, candidates
from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.records import EdgeKind
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


class AllOnes(PolicyGradient):
    """Every outcome has advantage 1, so that every path is kept."""

    name: str = "all_ones"
    min_group_size: int = 1

    def advantages_of(self, outcomes: Sequence[Outcome], rewards: Any, state: Any) -> list[float]:
        return [1.0] * len(outcomes)


def group_samples(
    calls: Sequence[Candidate],
    algorithm: PolicyGradient,
    *,
    aggregation: str = "token-mean",
    max_paths: int | None = 5,
) -> list[Sample]:
    drawn = draw_group(
        run="r",
        step=1,
        policy=calls[0].vertex.policy if calls else "none",
        group_id="g",
        task_id="t",
        calls=calls,
        seed=0,
        max_paths=max_paths,
        reward_field=algorithm.reward_field,
    )
    estimates = StepEstimates(algorithm, Aggregation(name=aggregation), {})
    return [sample for group in (estimates.add(drawn) or estimates.close()) for sample in group]


def samples_of(*members: EndedEpisode, **algorithms: PolicyGradient) -> dict[str, list[Sample]]:
    calls = [call for member in members for call in candidates(member)]
    return {
        policy: group_samples([call for call in calls if call.vertex.policy == policy], algorithm)
        for policy, algorithm in (algorithms or {"planner": Grpo(), "solver": Grpo()}).items()
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
    samples = group_samples(calls, Grpo(reward_field="judge"), max_paths=None)
    assert [s.record.reward for s in samples] == [1.0, 0.0]
    assert [round(s.record.advantage, 3) for s in samples] == [0.707, -0.707]


@pytest.mark.parametrize("value", [[1.0, 0.5, 0.5], float("nan"), "good", None], ids=str)
def test_a_call_whose_reward_field_is_no_number_leaves_first_and_says_why(value: Any) -> None:
    calls = [call for number in range(3) for call in candidates(member(number, 5.0))]
    for call, judged in zip(calls, (1.0, 0.0, value), strict=True):
        call.vertex.fields["judge"] = FieldValue(value=judged, source="judge", ready_s=1.0)
    *kept, dropped = group_samples(calls, Grpo(reward_field="judge", kl=Kl(coefficient=0.1)))
    assert [round(s.record.advantage, 3) for s in kept] == [0.707, -0.707]
    assert (dropped.row, dropped.cause, dropped.record.state) == (None, "no_reward", "dropped")
    assert dropped.record.invocation_id == calls[2].vertex.invocation_id
    assert (dropped.record.reward, dropped.record.num_trainable) == (None, 0)


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
    samples = group_samples(shared, Grpo())
    assert advantages(samples) == [0.707, -0.707, -0.707, -0.707]


def test_a_conversation_is_one_sample_that_trains_each_of_its_answers_once() -> None:
    first = vertex("g-m0-a0-i0", "solver")
    second = replace(
        vertex("g-m0-a0-i1", "solver"), prompt_ids=(*(first.prompt_ids or ()), *first.token_ids, 7)
    )
    calls = [Candidate(vertex=v, member=0, reward=1.0) for v in (first, second)]
    (sample,) = group_samples(calls, AllOnes())
    assert sample.record.invocation_ids == ["g-m0-a0-i0", "g-m0-a0-i1"]
    assert sample.row is not None and sample.row.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 1]


def branched(number: int, reward: float) -> list[Candidate]:
    """Three leaves of one conversation: two continue its second turn, one its first. All ids are unlike."""
    seen = iter(range(100))

    def turn(name: str, before: Vertex | None, num_tokens: int) -> Vertex:
        invocation_id = f"g-m{number}-a0-{name}"
        history = (*(before.prompt_ids or ()), *before.token_ids) if before else ()
        return replace(
            vertex(invocation_id, "solver", num_tokens),
            parents=((before.invocation_id, EdgeKind.EXTENDS),) if before else (),
            prompt_ids=(*history, next(seen)),
            token_ids=tuple(next(seen) for _ in range(num_tokens)),
        )

    first = turn("i0", None, 4)
    second = turn("i1", first, 3)
    calls = [first, second, turn("i2", second, 2), turn("i3", second, 5), turn("i4", first, 1)]
    return [Candidate(vertex=v, member=number, reward=reward, is_inherited=True) for v in calls]


@pytest.mark.parametrize("max_paths", [None, 3, 2, 1])
def test_leaves_that_share_what_was_sampled_own_each_token_once_and_their_episode_weighs_one(
    max_paths: int | None,
) -> None:
    calls = [*branched(0, 1.0), *branched(1, 0.0)]
    samples = group_samples(calls, Grpo(normalise="none"), aggregation="episode-mean", max_paths=max_paths)
    for number in (0, 1):
        rows = [s.row for s in samples if s.row is not None and s.row.episode_id == f"g-m{number}"]
        assert len(rows) == min(3, max_paths or 3)
        sampled = [token for call in branched(number, 0.0) for token in call.vertex.token_ids]
        owned = [token for row in rows for token in row.token_ids[row.loss_mask == 1].tolist()]
        assert len(set(owned)) == len(owned) and set(owned) <= set(sampled)
        assert sorted(owned) == sorted(sampled) or max_paths in (1, 2)
        assert math.fsum(row.weight * int(row.loss_mask.sum()) for row in rows) == pytest.approx(1.0)
        assert len({row.weight for row in rows}) == 1, "a token weighs the same in every path"


@pytest.mark.parametrize("max_paths", [1, 2, 3, None])
def test_an_episode_gives_at_most_so_many_paths(max_paths: int | None) -> None:
    calls = [call for call in candidates(member(0, None, 1.0, 0.0, 1.0)) if call.reward is not None]
    samples = group_samples(calls, AllOnes(), max_paths=max_paths)
    assert len(samples) == min(3, max_paths or 3)


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [
        ("token-mean", [1, 1, 1, 1], 4 + 5 + 4 + 5),
        ("seq-mean-token-sum", [1, 1, 1, 1], 4),
        ("seq-mean-token-sum-norm", [1 / 16, 1 / 16, 1 / 16, 1 / 16], 4),
        ("seq-mean-token-mean", [1 / 4, 1 / 5, 1 / 4, 1 / 5], 4),
        ("episode-mean", [1 / 9, 1 / 9, 1 / 9, 1 / 9], 2),
    ],
)
def test_weights_and_denominator_of_each_aggregation(
    aggregation: Any, weights: list[float], denominator: int
) -> None:
    samples = samples_of(member(0, 0.0, 1.0, 0.0), member(1, 0.0, 1.0, 0.0))["solver"]
    norm_tokens = 16 if aggregation == "seq-mean-token-sum-norm" else None
    rule = Aggregation.of(Grpo(aggregation=aggregation, norm_tokens=norm_tokens))
    weighed = rule.weigh(samples)
    in_order = sorted(weighed, key=lambda sample: sample.record.sample_id)
    assert [s.row.weight for s in in_order if s.row] == pytest.approx(weights)
    assert rule.denominator(weighed) == denominator


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "episode-mean"]
)
def test_dropped_samples_are_in_no_denominator(aggregation: Any) -> None:
    samples = samples_of(member(0, 0.0, 1.0, 0.0), member(1, 0.0, 1.0, 0.0))["solver"]
    dropped = samples_of(member(0, 1.0), member(1, 1.0))["planner"]
    rule = Aggregation(name=aggregation)
    assert rule.denominator([*samples, *dropped]) == rule.denominator(samples)


def test_the_divisor_belongs_to_the_norm_aggregation_and_to_no_other() -> None:
    for knobs in ({"aggregation": "seq-mean-token-sum-norm"}, {"norm_tokens": 16}):
        with pytest.raises(ValueError, match="norm_tokens .* belongs to seq-mean-token-sum-norm"):
            Grpo.parse(knobs)


def test_a_row_names_its_episode_and_its_oldest_version() -> None:
    row = samples_of(member(0, 1.0), member(1, 0.0))["planner"][0].row
    assert row is not None and (row.episode_id, row.version_min) == ("g-m0", 4)


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ([(1.0,), (1.0,)], "constant_group"),
        ([(1.0,)], "small_group"),
        ([(0.0,), (1.0,), (0.5,)], "no_advantage"),  # that of the mean; the others are kept
    ],
)
def test_a_dropped_sample_says_why(members: list[tuple[float]], cause: str) -> None:
    samples = samples_of(*(member(n, *rewards) for n, rewards in enumerate(members)))["planner"]
    assert {sample.cause for sample in samples if sample.row is None} == {cause}
    assert all(sample.cause is None for sample in samples if sample.row is not None)


@pytest.mark.parametrize(
    "algorithm", [Grpo(kl=Kl(coefficient=0.1)), Grpo(entropy=0.01), Ppo()], ids=["kl", "entropy", "critic"]
)
def test_a_row_without_advantage_is_kept_where_another_term_gives_it_a_gradient(
    algorithm: PolicyGradient,
) -> None:
    samples = samples_of(member(0, 0.0), member(1, 0.0), planner=algorithm)["planner"]
    assert all(sample.row is not None and sample.row.advantage == 0.0 for sample in samples)
    assert {sample.record.state for sample in samples} == {"ready"}


def test_the_overlong_penalty_moves_the_advantage_and_not_the_recorded_reward() -> None:
    """Of a limit of 8, 3 and 1 tokens were used: 3/8 and 1/8 into a buffer of 8."""
    overlong = Grpo(normalise="none", overlong=Overlong(buffer_tokens=8))
    long, short = member(0, 1.0), member(1, 1.0)
    (cut,) = short.vertices
    short.vertices[:] = [replace(cut, token_ids=(10,), logprobs=(-0.5,), version_spans=((4, 0, 1),))]
    samples = samples_of(long, short, planner=overlong)["planner"]
    assert [s.record.reward for s in samples] == [1.0, 1.0]
    assert [s.record.advantage for s in samples] == pytest.approx([-0.125, 0.125])


def conversation(reward_of_turns: tuple[float, float], number: int) -> list[Candidate]:
    """Two turns of one agent on one path, each scored for itself."""
    first = vertex(f"g-m{number}-a0-i0", "solver")
    second = replace(
        vertex(f"g-m{number}-a0-i1", "solver"), prompt_ids=(*(first.prompt_ids or ()), *first.token_ids, 7)
    )
    return [
        Candidate(vertex=v, member=number, reward=reward, round=turn)
        for turn, (v, reward) in enumerate(zip((first, second), reward_of_turns, strict=True))
    ]


def test_turns_of_one_path_that_were_scored_apart_have_an_advantage_for_each_token() -> None:
    """Both turns of episode 0 earned 1, so they share a row; in their rounds they stand at unlike places."""
    calls = [*conversation((1.0, 1.0), 0), *conversation((0.0, 1.0), 1), *conversation((0.0, 0.0), 2)]
    algorithm = HierarchicalGrpo(normalise="none")
    row = next(s.row for s in group_samples(calls, algorithm) if s.record.episode_id == "g-m0")
    assert row is not None
    by_hand = {0: (1.0 - 0.5) + (1.0 - 1 / 3), 1: (1.0 - 0.5) + (1.0 - 2 / 3)}
    expected = [0, 0, *[by_hand[0]] * 3, 0, *[by_hand[1]] * 3]
    assert row.columns["advantages"].tolist() == pytest.approx(expected)
    assert row.advantage == pytest.approx((by_hand[0] + by_hand[1]) / 2)


def test_an_answer_without_tokens_is_no_sample_but_its_reward_is_in_the_baseline() -> None:
    empty, full = member(0, 0.0), member(1, 1.0)
    empty.vertices[:] = [replace(empty.vertices[0], token_ids=(), logprobs=(), version_spans=())]
    (sample,) = samples_of(empty, full, planner=Grpo(normalise="none"))["planner"]
    assert (sample.record.episode_id, sample.record.advantage) == ("g-m1", 0.5)


def test_calls_beyond_the_paths_of_an_episode_still_count_in_the_baseline() -> None:
    calls = candidates(member(0, None, 1.0, 0.0, 0.0)) + candidates(member(1, None, 1.0))
    scored = [call for call in calls if call.reward is not None]
    few = group_samples(scored, Grpo(normalise="none"), max_paths=1)
    assert all(s.record.advantage == pytest.approx((s.record.reward or 0.0) - 0.5) for s in few)
    assert len(few) == 2
