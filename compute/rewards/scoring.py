"""Turns what a reward function returned into a value per call. A value that is not finite is no verdict.

Precedence for a call: its own entry, else its agent's entry, else the team's. A failed or unscored call
never becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megloom.compute.workload import Score


class RewardError(Exception):
    """A reward function raised, or returned something that is no reward."""


def normalise(value: Any, *, calls: Mapping[str, str], agents: Collection[str] = ()) -> Score:
    """Returns a Score with one entry in `calls` for each call of `calls` (invocation id → agent).

    `agents` are further agents that may have a reward: those whose calls are not known here.
    Raises: RewardError for another type, an unknown key, or a team reward that is not finite.
    """
    score = _as_score(value, calls, agents)
    if not math.isfinite(score.team):
        raise RewardError(f"team reward must be finite, got {score.team!r}")
    per_call: dict[str, float | None] = {}
    for invocation_id, agent in calls.items():
        reward = score.calls.get(invocation_id, score.agents.get(agent, score.team))
        per_call[invocation_id] = None if reward is None or not math.isfinite(reward) else float(reward)
    return Score(team=float(score.team), agents=score.agents, calls=per_call, metrics=score.metrics)


def names_call(value: Any, invocation_id: str) -> bool:
    """True if the returned value scores the call for itself; else the call inherits its agent's or team's."""
    named = value.calls if isinstance(value, Score) else value
    return isinstance(named, Mapping) and invocation_id in named


def _as_score(value: Any, calls: Mapping[str, str], others: Collection[str]) -> Score:
    if isinstance(value, Score):
        score = value
    elif isinstance(value, int | float):
        score = Score(team=float(value))
    elif isinstance(value, Mapping) and value:
        agents = {k: v for k, v in value.items() if k not in calls}
        own = {k: v for k, v in value.items() if k in calls}
        numbers = [v for v in value.values() if v is not None]
        score = Score(team=sum(numbers) / len(numbers) if numbers else math.nan, agents=agents, calls=own)
    else:
        raise RewardError(f"expected a number, a mapping or a Score, got {type(value).__name__}")
    known = {*calls.values(), *others}
    for name in score.agents:
        if name not in known:
            raise RewardError(
                f"reward for {name!r}: no agent or call of this episode (agents: {sorted(known)})"
            )
    for name in score.calls:
        if name not in calls:
            raise RewardError(f"reward for call {name!r}: not a call of this episode")
    return score
