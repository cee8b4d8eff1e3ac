"""From complete groups to training rows: advantages per (task, agent), one sample per scored call.

A group is final before its first gradient: unusable members have left, then the minimum size is checked.
Samples whose advantage is exactly 0 carry no gradient; they are recorded as dropped and not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megloom.compute.conductor.episodes import EndedEpisode
from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.records import SampleKind, SampleRecord
from megloom.compute.graph.states import InvocationState, SampleState
from megloom.compute.graph.token_paths import completion_segment_id
from megloom.compute.graph.training_view import Candidate
from megloom.compute.rollout.protocol import DemonstrationRow
from megloom.compute.trainers.protocol import TrainingRow

Advantages = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A record of the sample and the row that the trainer gets; `row` is None for a dropped one."""

    record: SampleRecord
    row: TrainingRow | None


def candidates(member: EndedEpisode) -> list[Candidate]:
    """The calls of a scored member that ended with an answer; a failed member has none."""
    if not member.is_scored:
        return []
    rewards = {call.invocation_id: call.reward for call in member.outcome.calls}
    return [
        Candidate(vertex=vertex, member=member.episode.member, reward=rewards.get(vertex.invocation_id))
        for vertex in member.vertices
        if vertex.state is InvocationState.DONE
    ]


def policy_samples(
    *,
    run: str,
    step: int,
    group_id: str,
    task_id: str,
    calls: Sequence[Candidate],
    estimate: Advantages,
    reward_field: str | None = None,
) -> list[Sample]:
    """The samples of one policy in one complete group, an own baseline for each agent.

    `reward_field` names the user-defined field that stands for the reward. Calls without a reward leave
    before any statistic.
    """
    by_agent: dict[str, list[tuple[Vertex, float]]] = {}
    for call in calls:
        reward = call.reward
        if reward_field is not None:
            field = call.vertex.fields.get(reward_field)
            reward = field.value if field is not None else None
        if reward is not None:
            by_agent.setdefault(call.vertex.agent, []).append((call.vertex, float(reward)))
    return [
        _sample(run, step, group_id, task_id, vertex, reward, advantage)
        for scored in by_agent.values()
        for (vertex, reward), advantage in zip(
            scored, estimate([reward for _, reward in scored]), strict=True
        )
    ]


def _sample(
    run: str, step: int, group_id: str, task_id: str, vertex: Vertex, reward: float, advantage: float
) -> Sample:
    assert vertex.prompt_ids is not None
    num_prompt, num_sampled = len(vertex.prompt_ids), len(vertex.token_ids)
    record = SampleRecord(
        sample_id=f"{vertex.invocation_id}-s",
        run=run,
        step=step,
        kind=SampleKind.ROLLOUT.value,
        policy=vertex.policy,
        agent=vertex.agent,
        group_id=group_id,
        episode_id=vertex.episode_id,
        invocation_id=vertex.invocation_id,
        task_id=task_id,
        leaf_segment=completion_segment_id(vertex.invocation_id),
        num_tokens=num_prompt + num_sampled,
        num_trainable=num_sampled,
        reward=reward,
        advantage=advantage,
        version_min=min(span[0] for span in vertex.version_spans),
        version_max=max(span[0] for span in vertex.version_spans),
        micro_batch_id=None,
        state=SampleState.READY.value if advantage != 0.0 else SampleState.DROPPED.value,
    )
    if advantage == 0.0:
        return Sample(record=record, row=None)
    mask = np.zeros(num_prompt + num_sampled, dtype=np.uint8)
    mask[num_prompt:] = 1
    logprobs = np.zeros(num_prompt + num_sampled, dtype=np.float32)
    logprobs[num_prompt:] = vertex.logprobs
    row = TrainingRow(
        sample_id=record.sample_id,
        token_ids=np.array(vertex.prompt_ids + vertex.token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        advantage=advantage,
        weight=1.0,
        temperature=vertex.temperature,
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
