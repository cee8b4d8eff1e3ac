"""From complete groups to training rows: paths of token trees, advantages per (task, agent).

A group is final before its first gradient: unusable members have left, then the minimum size is checked.
Samples whose advantage is exactly 0 carry no gradient; they are recorded as dropped and not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megloom.compute.conductor.episodes import EndedEpisode
from megloom.compute.graph.records import SampleKind, SampleRecord
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.graph.states import InvocationState, SampleState
from megloom.compute.graph.token_paths import completion_segment_id
from megloom.compute.graph.training_view import Candidate
from megloom.compute.rollout.protocol import DemonstrationRow
from megloom.compute.rollout.samples import DrawnPath, draw_paths
from megloom.compute.trainers.protocol import TrainingRow

Advantages = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A record of the sample and the row that the trainer gets; `row` is None for a dropped one."""

    record: SampleRecord
    row: TrainingRow | None


def candidates(member: EndedEpisode) -> list[Candidate]:
    """The calls of a scored member that ended with an answer fit for training; a failed member has none."""
    if not member.is_scored:
        return []
    scores = {call.invocation_id: call for call in member.outcome.calls}
    found = []
    for vertex in member.vertices:
        if vertex.state is InvocationState.DONE and vertex.unusable is None:
            score = scores.get(vertex.invocation_id)
            found.append(
                Candidate(
                    vertex=vertex,
                    member=member.episode.member,
                    reward=score.reward if score else None,
                    is_inherited=score.is_inherited if score else False,
                )
            )
    return found


def policy_samples(
    *,
    run: str,
    step: int,
    group_id: str,
    task_id: str,
    calls: Sequence[Candidate],
    estimate: Advantages,
    seed: int,
    max_paths: int | None,
    reward_field: str | None = None,
) -> list[Sample]:
    """The samples of one policy in one complete group, an own baseline for each agent.

    Each episode gives at most `max_paths` paths of its token tree, in which every sampled token is trained
    once. Statistics are over outcomes: a call that was scored for itself is one, and so are all calls of an
    agent that share their episode's reward. `reward_field` names the user-defined field that stands for the
    reward. Calls without a reward leave before any statistic.
    """
    episodes: dict[str, list[Candidate]] = {}
    for call in calls:
        episodes.setdefault(call.vertex.episode_id, []).append(_rewarded(call, reward_field))
    inherits = {call.vertex.invocation_id for call in calls if call.is_inherited and reward_field is None}
    outcomes: dict[str, dict[str, float]] = {}  # agent → outcome → reward
    drawn: list[tuple[str, str, DrawnPath]] = []
    for episode_id, members in episodes.items():
        for path in draw_paths(members, seed=derive_seed(seed, "paths", episode_id), max_paths=max_paths):
            outcome = episode_id if path.leaf_invocation in inherits else path.leaf_invocation
            outcomes.setdefault(path.agent, {})[outcome] = path.reward
            drawn.append((episode_id, outcome, path))
    advantages = {
        agent: dict(zip(rewards, estimate(list(rewards.values())), strict=True))
        for agent, rewards in outcomes.items()
    }
    policies = {call.vertex.agent: call.vertex.policy for call in calls}
    return [
        _sample(
            run,
            step,
            group_id,
            task_id,
            episode_id,
            policies[path.agent],
            path,
            advantages[path.agent][outcome],
        )
        for episode_id, outcome, path in drawn
    ]


def _rewarded(call: Candidate, reward_field: str | None) -> Candidate:
    if reward_field is None:
        return call
    field = call.vertex.fields.get(reward_field)
    return replace(call, reward=float(field.value) if field is not None else None)


def _sample(
    run: str,
    step: int,
    group_id: str,
    task_id: str,
    episode_id: str,
    policy: str,
    path: DrawnPath,
    advantage: float,
) -> Sample:
    record = SampleRecord(
        sample_id=f"{path.leaf_invocation}-s",
        run=run,
        step=step,
        kind=SampleKind.ROLLOUT.value,
        policy=policy,
        agent=path.agent,
        group_id=group_id,
        episode_id=episode_id,
        invocation_id=path.leaf_invocation,
        invocation_ids=list(path.owned),
        task_id=task_id,
        leaf_segment=completion_segment_id(path.leaf_invocation),
        num_tokens=len(path.token_ids),
        num_trainable=path.num_trainable,
        reward=path.reward,
        advantage=advantage,
        version_min=path.version_min,
        version_max=path.version_max,
        micro_batch_id=None,
        state=SampleState.READY.value if advantage != 0.0 else SampleState.DROPPED.value,
    )
    if advantage == 0.0:
        return Sample(record=record, row=None)
    row = TrainingRow(
        sample_id=record.sample_id,
        token_ids=path.token_ids,
        loss_mask=path.loss_mask,
        logprobs=path.logprobs,
        advantage=advantage,
        weight=1.0,
        temperature=path.temperature,
    )
    return Sample(record=record, row=row)


def demonstration_samples(
    *, run: str, step: int, first: int, rows: Sequence[DemonstrationRow]
) -> list[Sample]:
    """Samples that teach an answer: numbered from `first`, advantage 1, no sampling record."""
    samples = []
    for number, row in enumerate(rows, start=first):
        name = f"{row.agent}-d{step:06d}-{number:06d}"
        num_prompt, num_answer = len(row.prompt_ids), len(row.answer_ids)
        mask = np.zeros(num_prompt + num_answer, dtype=np.uint8)
        mask[num_prompt:] = 1
        record = SampleRecord(
            sample_id=name,
            run=run,
            step=step,
            kind=SampleKind.DEMONSTRATION.value,
            policy=row.policy,
            agent=row.agent,
            group_id="",
            episode_id="",
            invocation_id=None,
            invocation_ids=[],
            task_id=None,
            leaf_segment=f"{name}-t",
            num_tokens=num_prompt + num_answer,
            num_trainable=num_answer,
            reward=None,
            advantage=1.0,
            version_min=None,
            version_max=None,
            micro_batch_id=None,
            state=SampleState.READY.value,
        )
        training = TrainingRow(
            sample_id=name,
            token_ids=np.array(row.prompt_ids + row.answer_ids, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.zeros(num_prompt + num_answer, dtype=np.float32),
            advantage=1.0,
            weight=1.0,
            temperature=1.0,
        )
        samples.append(Sample(record=record, row=training))
    return samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Aggregation:
    """How token losses become one number: each row's weight, and the count that the sum is divided by.

    Names are verl's: token-mean, seq-mean-token-mean; episode-mean averages an episode's tokens first.
    """

    name: str

    def weigh(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of whole episodes with their rows' weights set."""
        tokens: dict[str, int] = {}
        for sample in samples:
            if sample.row is not None:
                key = self._unit(sample)
                tokens[key] = tokens.get(key, 0) + sample.record.num_trainable
        if self.name == "token-mean":
            return list(samples)
        return [
            replace(sample, row=replace(sample.row, weight=1.0 / tokens[self._unit(sample)]))
            if sample.row is not None
            else sample
            for sample in samples
        ]

    def denominator(self, samples: Sequence[Sample]) -> int:
        """What the step's sums are divided by: trainable tokens, rows or episodes that carry loss."""
        trained = [sample for sample in samples if sample.row is not None]
        if self.name == "token-mean":
            return sum(sample.record.num_trainable for sample in trained)
        return len({self._unit(sample) for sample in trained})

    def _unit(self, sample: Sample) -> str:
        return sample.record.episode_id if self.name == "episode-mean" else sample.record.sample_id
