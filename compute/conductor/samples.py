"""Training samples: the record of each and the row that the trainer gets, with the weights of the loss.

Samples whose advantage is exactly 0 carry no gradient; they are recorded as dropped, with a cause that the
step's report counts, and not sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megloom.compute.algorithms.base import Outcome, PolicyGradient
from megloom.compute.algorithms.statistics import are_equal
from megloom.compute.conductor.draws import DrawnGroup
from megloom.compute.conductor.episodes import EndedEpisode
from megloom.compute.graph.records import SampleKind, SampleRecord
from megloom.compute.graph.states import InvocationState, SampleState
from megloom.compute.graph.token_paths import completion_segment_id
from megloom.compute.graph.training_view import Candidate
from megloom.compute.rollout.protocol import DemonstrationRow
from megloom.compute.rollout.samples import DrawnPath
from megloom.compute.trainers.protocol import TrainingRow

# Why a sample was dropped.
SMALL_GROUP = "small_group"
CONSTANT_GROUP = "constant_group"
NO_ADVANTAGE = "no_advantage"
NO_REWARD = "no_reward"  # its reward field is no number


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A record of the sample and the row that the trainer gets; a dropped one has a `cause` instead."""

    record: SampleRecord
    row: TrainingRow | None
    cause: str | None = None

    @property
    def is_counted(self) -> bool:
        """Whether it is in the loss's mean. One of a group with signal whose own advantage happens to be 0
        is: not sent, as its gradient is 0, but the next float to 0 must not give another update.
        """
        return self.row is not None or self.cause == NO_ADVANTAGE


def candidates(member: EndedEpisode) -> list[Candidate]:
    """The calls of a scored member that ended with an answer fit for training; a failed member has none."""
    if not member.is_scored:
        return []
    scores = {call.invocation_id: call for call in member.outcome.calls}
    found = []
    turns: Counter[str] = Counter()
    for vertex in member.vertices:
        turn, turns[vertex.agent] = turns[vertex.agent], turns[vertex.agent] + 1
        if vertex.state is InvocationState.DONE and vertex.unusable is None:
            score = scores.get(vertex.invocation_id)
            found.append(
                Candidate(
                    vertex=vertex,
                    member=member.episode.member,
                    reward=score.reward if score else None,
                    is_inherited=score.is_inherited if score else False,
                    round=turn,
                )
            )
    return found


def samples_of(
    drawn: DrawnGroup, advantages: Mapping[tuple[str, str], float], *, algorithm: PolicyGradient
) -> list[Sample]:
    """The group's samples, from the advantages of its outcomes by (agent, outcome).

    A path whose calls were scored apart has an advantage for each token, and the mean of these in its record.
    One without an advantage is dropped, and says why, unless another term of the loss gives it a gradient.
    An answer whose reward field is no number is dropped in any case.
    """
    causes = _causes(drawn.outcomes, algorithm.smallest_group)
    drawn_samples = [
        _sample(drawn, episode_id, path, advantages, None if algorithm.trains_without_advantage else causes)
        for episode_id, path in drawn.paths
    ]
    return [*drawn_samples, *(_unscored(drawn, call) for call in drawn.unscored)]


def _causes(outcomes: Sequence[Outcome], smallest_group: int) -> dict[str, str]:
    """By agent, why one of its samples may have no advantage."""
    rewards: dict[str, list[float]] = {}
    for outcome in outcomes:
        rewards.setdefault(outcome.agent, []).append(outcome.reward)
    return {
        agent: SMALL_GROUP
        if len(found) < smallest_group
        else (CONSTANT_GROUP if are_equal(found) else NO_ADVANTAGE)
        for agent, found in rewards.items()
    }


def _sample(
    drawn: DrawnGroup,
    episode_id: str,
    path: DrawnPath,
    advantages: Mapping[tuple[str, str], float],
    causes: Mapping[str, str] | None,
) -> Sample:
    own = [advantages[path.agent, drawn.outcome_of[call]] for call in path.owned]
    num_tokens = zip(own, path.owned_tokens, strict=True)
    advantage = own[0] if len(set(own)) == 1 else math.fsum(a * n for a, n in num_tokens) / path.num_trainable
    cause = causes[path.agent] if causes is not None and not any(own) else None
    record = SampleRecord(
        sample_id=f"{path.leaf_invocation}-s",
        run=drawn.run,
        step=drawn.step,
        kind=SampleKind.ROLLOUT.value,
        policy=drawn.policy,
        agent=path.agent,
        group_id=drawn.group_id,
        episode_id=episode_id,
        invocation_id=path.leaf_invocation,
        invocation_ids=list(path.owned),
        task_id=drawn.task_id,
        leaf_segment=completion_segment_id(path.leaf_invocation),
        num_tokens=len(path.token_ids),
        num_trainable=path.num_trainable,
        reward=path.reward,
        advantage=advantage,
        version_min=path.version_min,
        version_max=path.version_max,
        micro_batch_id=None,
        state=(SampleState.READY if cause is None else SampleState.DROPPED).value,
    )
    if cause is not None:
        return Sample(record=record, row=None, cause=cause)
    row = TrainingRow(
        sample_id=record.sample_id,
        token_ids=path.token_ids,
        loss_mask=path.loss_mask,
        logprobs=path.logprobs,
        advantage=advantage,
        weight=1.0,
        temperature=path.temperature,
        episode_id=episode_id,
        version_min=path.version_min,
        columns={}
        if len(set(own)) == 1
        else {"advantages": spread(path.loss_mask, np.repeat(own, path.owned_tokens))},
    )
    return Sample(record=record, row=row)


def _unscored(drawn: DrawnGroup, call: Candidate) -> Sample:
    """An answer that is not in the tree of its episode: it is a path of its own that nobody trains on."""
    vertex = call.vertex
    record = SampleRecord(
        sample_id=f"{vertex.invocation_id}-s",
        run=drawn.run,
        step=drawn.step,
        kind=SampleKind.ROLLOUT.value,
        policy=drawn.policy,
        agent=vertex.agent,
        group_id=drawn.group_id,
        episode_id=vertex.episode_id,
        invocation_id=vertex.invocation_id,
        invocation_ids=[vertex.invocation_id],
        task_id=drawn.task_id,
        leaf_segment=completion_segment_id(vertex.invocation_id),
        num_tokens=len(vertex.prompt_ids or ()) + len(vertex.token_ids),
        num_trainable=0,
        reward=None,
        advantage=0.0,
        version_min=call.version_min,
        version_max=max((version for version, _, _ in vertex.version_spans), default=None),
        micro_batch_id=None,
        state=SampleState.DROPPED.value,
    )
    return Sample(record=record, row=None, cause=NO_REWARD)


def spread(
    loss_mask: npt.NDArray[np.uint8], values_N: Sequence[float] | npt.NDArray[np.float64]
) -> npt.NDArray[np.float32]:
    """A column of a row, [T], from one value for each of its N trainable tokens in order; 0 elsewhere."""
    column = np.zeros(len(loss_mask), dtype=np.float32)
    column[loss_mask.astype(bool)] = np.asarray(values_N, dtype=np.float32)
    return column


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

        token-mean                Σ over tokens / tokens
        seq-mean-token-sum        Σ over tokens / rows
        seq-mean-token-sum-norm   Σ over tokens / norm_tokens / rows
        seq-mean-token-mean       Σ over rows of the mean over a row's tokens / rows
        episode-mean              Σ over episodes of the mean over an episode's tokens / episodes

    Names are verl's but the last. What counts is `Sample.is_counted`: groups without signal are in no mean.
    """

    name: str
    norm_tokens: int | None = None

    @classmethod
    def of(cls, algorithm: PolicyGradient) -> Aggregation:
        return cls(name=algorithm.aggregation, norm_tokens=algorithm.norm_tokens)

    def weigh(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of whole episodes with their rows' weights set."""
        tokens: Counter[str] = Counter()
        for sample in samples:
            if sample.is_counted:
                tokens[self._unit(sample)] += sample.record.num_trainable
        return [
            replace(sample, row=replace(sample.row, weight=self._weight(tokens[self._unit(sample)])))
            if sample.row is not None
            else sample
            for sample in samples
        ]

    def denominator(self, samples: Sequence[Sample]) -> int:
        """What the step's sums are divided by: trainable tokens, rows or episodes that count."""
        counted = [sample for sample in samples if sample.is_counted]
        if self.name == "token-mean":
            return sum(sample.record.num_trainable for sample in counted)
        return len({self._unit(sample) for sample in counted})

    def _weight(self, num_tokens: int) -> float:
        """Of a row in a unit with so many trainable tokens."""
        if self.name in ("token-mean", "seq-mean-token-sum"):
            return 1.0
        if self.name == "seq-mean-token-sum-norm":
            assert self.norm_tokens is not None, self
            return 1.0 / self.norm_tokens
        return 1.0 / num_tokens

    def _unit(self, sample: Sample) -> str:
        return sample.record.episode_id if self.name == "episode-mean" else sample.record.sample_id
