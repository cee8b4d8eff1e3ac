"""A complete group as the algorithm sees it: the outcomes of its members, and the paths to train on.

A group is final before its first gradient: members and calls that cannot be used have left. Statistics are
over outcomes: a call that was scored for itself is one, and so are all calls of an agent that share their
episode's reward. An outcome counts also where no token of it can be trained: an empty answer was still given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megloom.compute.algorithms.base import Outcome
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.graph.training_view import Candidate
from megloom.compute.rollout.samples import DrawnPath, draw_paths


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnGroup:
    """One policy's part of a group. `paths` are (episode, path), `outcome_of` maps a call to its outcome.

    `unscored` are answers whose reward field is there but is no finite number.
    """

    run: str
    step: int
    policy: str
    group_id: str
    task_id: str
    outcomes: tuple[Outcome, ...]
    outcome_of: Mapping[str, str]
    paths: tuple[tuple[str, DrawnPath], ...]
    unscored: tuple[Candidate, ...] = ()


def draw_group(
    *,
    run: str,
    step: int,
    policy: str,
    group_id: str,
    task_id: str,
    calls: Sequence[Candidate],
    seed: int,
    max_paths: int | None,
    reward_field: str | None = None,
) -> DrawnGroup:
    """The outcomes and paths of one policy's calls in one complete group.

    Each episode gives at most `max_paths` paths of its token tree, in which every sampled token is trained
    once. `reward_field` names the user-defined field that stands for the reward: each call has its own. Calls
    without a reward, or with a field that is no finite number, leave before any statistic.
    """
    calls = [_rewarded(call, reward_field) for call in calls]
    episodes: dict[str, list[Candidate]] = {}
    for call in calls:
        episodes.setdefault(call.vertex.episode_id, []).append(call)
    paths = [
        (episode_id, path)
        for episode_id, members in episodes.items()
        for path in draw_paths(members, seed=derive_seed(seed, "paths", episode_id), max_paths=max_paths)
    ]
    trained: dict[str, int] = {}
    for _, path in paths:
        for call_id, num_tokens in zip(path.owned, path.owned_tokens, strict=True):
            trained[call_id] = trained.get(call_id, 0) + num_tokens
    scored = [call for call in calls if call.reward is not None]
    return DrawnGroup(
        run=run,
        step=step,
        policy=policy,
        group_id=group_id,
        task_id=task_id,
        outcomes=tuple(_outcomes(group_id, scored, trained)),
        outcome_of={call.vertex.invocation_id: _key(call) for call in scored},
        paths=tuple(paths),
        unscored=tuple(call for call in calls if _is_unscored(call, reward_field)),
    )


def _rewarded(call: Candidate, reward_field: str | None) -> Candidate:
    if reward_field is None:
        return call
    return replace(call, reward=_number(call, reward_field), is_inherited=False)


def _is_unscored(call: Candidate, reward_field: str | None) -> bool:
    is_there = reward_field is not None and reward_field in call.vertex.fields
    return is_there and call.reward is None and bool(call.vertex.token_ids)


def _number(call: Candidate, name: str) -> float | None:
    """The call's field, None if it is missing or no finite number, such as one with a number per token."""
    field = call.vertex.fields.get(name)
    if field is None or not isinstance(field.value, int | float) or not math.isfinite(field.value):
        return None
    return float(field.value)


def _key(call: Candidate) -> str:
    return call.vertex.episode_id if call.is_inherited else call.vertex.invocation_id


def _outcomes(group_id: str, scored: Sequence[Candidate], trained: Mapping[str, int]) -> list[Outcome]:
    """One per (agent, outcome), in the order of their first calls; `trained` counts each call's tokens."""
    shared: dict[tuple[str, str], list[Candidate]] = {}
    for call in scored:
        shared.setdefault((call.vertex.agent, _key(call)), []).append(call)
    outcomes = []
    for (agent, key), calls in shared.items():
        first = calls[0]
        assert first.reward is not None
        num_tokens = sum(trained.get(call.vertex.invocation_id, 0) for call in calls)
        room = min(call.vertex.max_tokens - len(call.vertex.token_ids) for call in calls)
        outcomes.append(
            Outcome(
                key=key,
                episode_id=first.vertex.episode_id,
                group_id=group_id,
                agent=agent,
                reward=first.reward,
                round=0 if first.is_inherited else first.round,
                num_tokens=num_tokens,
                limit_tokens=num_tokens + room,
                num_calls=len(calls),
            )
        )
    return outcomes
