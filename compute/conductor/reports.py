"""What a session tells its clients after each step, as plain JSON: Dagster, the CLI and the report read it.

Means are never sent alone: every rate is a (sum, count) pair, divided once, where it is shown.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

Rate = tuple[float, int]


def ratio(rate: Rate | None) -> float | None:
    """The mean of a (sum, count) pair; None if nothing was counted."""
    return rate[0] / rate[1] if rate and rate[1] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentReport:
    """One agent in one step. `rates` are the workload's own metrics whose name starts with the agent's."""

    num_calls: int
    num_tokens: int
    reward: Rate
    rates: dict[str, Rate] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReport:
    """One policy in one step. `version` is what the step left behind; `trained` is False without samples.

    `dropped` counts the samples that carried no gradient, by cause. `rates` are the trainer's own metrics per
    token, such as "kl" and "value_loss" (`trainers.protocol.GradientReport.sums`).
    """

    trained: bool
    version: int
    parent_version: int | None
    uri: str
    digest: str
    num_samples: int
    num_trainable: int
    num_micro_batches: int
    loss: float | None
    grad_norm: float | None
    max_logprob_gap: float | None
    max_off_policy_steps: int
    dropped: dict[str, int] = field(default_factory=dict)
    rates: dict[str, Rate] = field(default_factory=dict)
    micro_batches: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """A pass over held-out tasks with the policy `versions`; `accuracy` is the mean team reward's pair."""

    num_tasks: int
    num_draws: int
    full: bool
    accuracy: Rate
    rates: dict[str, Rate]
    versions: dict[str, int]
    num_failed: int
    num_invocations: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """One consistency check of a step; a blocking one that fails ends the session."""

    name: str
    passed: bool
    blocking: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One committed step. `kind`: "start" (step 0: initial weights, warm start), "train" or "imitation"."""

    run: str
    step: int
    kind: str
    started_s: float
    finished_s: float
    reward: Rate
    num_tasks: int
    num_groups: int
    num_episodes: int
    num_invocations: int
    num_prompt_tokens: int
    num_completion_tokens: int
    failures: dict[str, int]
    seconds_by_activity: dict[str, float]
    agents: dict[str, AgentReport]
    policies: dict[str, PolicyReport]
    checks: list[CheckReport]
    evaluation: EvaluationReport | None
    timeline: list[dict[str, Any]]
    meg_uri: str
    config_hash: str
    code_hash: str
    epoch: int
    wall_time: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepReport:
        evaluation = data["evaluation"]
        return cls(
            **{
                **data,
                "reward": tuple(data["reward"]),
                "agents": {
                    name: AgentReport(**{**agent, "reward": tuple(agent["reward"]), "rates": _rates(agent)})
                    for name, agent in data["agents"].items()
                },
                "policies": {
                    name: PolicyReport(**{**policy, "rates": _rates(policy)})
                    for name, policy in data["policies"].items()
                },
                "checks": [CheckReport(**check) for check in data["checks"]],
                "evaluation": evaluation
                and EvaluationReport(
                    **{**evaluation, "accuracy": tuple(evaluation["accuracy"]), "rates": _rates(evaluation)}
                ),
            }
        )


def _rates(data: dict[str, Any]) -> dict[str, Rate]:
    return {name: (pair[0], pair[1]) for name, pair in data.get("rates", {}).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStatus:
    """`state`: starting, running, paused, finished, failed or cancelled; `failure` says why it failed."""

    run: str
    workload: str
    state: str
    step: int
    target_steps: int
    config_hash: str
    code_hash: str | None
    policies: list[str]
    agents: dict[str, str]
    versions: dict[str, int]
    num_tasks: int
    num_eval_tasks: int
    store_root: str
    failure: str | None
    waiting_for: str | None


ENDED = frozenset({"finished", "failed", "cancelled"})
