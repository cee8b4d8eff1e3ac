"""Outcomes for the tests: one for each member of each group, earned by its whole episode unless told else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megloom.compute.algorithms.base import Outcome


def outcome(reward: float, member: int = 0, group: str = "g", **overrides: object) -> Outcome:
    episode = f"{group}-m{member}"
    values = {"key": episode, "episode_id": episode, "agent": "solver", "num_tokens": 4, "limit_tokens": 64}
    return Outcome(group_id=group, reward=reward, **{**values, **overrides})  # type: ignore[arg-type]


def outcomes_of(groups: Mapping[str, Sequence[float]], **overrides: object) -> list[Outcome]:
    return [
        outcome(reward, member, group, **overrides)
        for group, rewards in groups.items()
        for member, reward in enumerate(rewards)
    ]
