"""The episodes of a step: what the agents did with the step's tasks, and how well."""

from __future__ import annotations

from typing import Any

import dagster as dg

from megloom.assets.metadata import plot, rate_rows, table
from megloom.assets.partitions import train_step
from megloom.assets.step import (
    CODE_VERSION,
    CommittedStep,
    asset_key,
    behavior_version,
    materialization,
    rollout_version,
    tasks_version,
)
from megloom.assets.system import System
from megloom.compute.conductor.reports import ratio


def specs(system: System) -> list[dg.AssetSpec]:
    return [
        dg.AssetSpec(
            asset_key(system, "rollout_batch"),
            deps=[asset_key(system, "tasks"), asset_key(system, "behavior_policy")],
            description="Episodes of the step's tasks, sampled by the step's behaviour policies.",
            group_name=system.name,
            kinds={"parquet"},
            code_version=CODE_VERSION,
            partitions_def=train_step,
        )
    ]


def event(step: CommittedStep) -> dg.AssetMaterialization:
    """Counts, mean reward and the reward's course; rates per agent, since a mean over agents hides them."""
    report, system = step.report, step.system
    return materialization(
        step,
        "rollout_batch",
        data_version=rollout_version(report),
        inputs={
            asset_key(system, "tasks"): tasks_version(step),
            asset_key(system, "behavior_policy"): behavior_version(report.run, step.behavior_versions),
        },
        metadata={
            "dagster/row_count": report.num_episodes,
            "mean_reward": ratio(report.reward),
            "num_scored": report.reward[1],
            **_counts(step),
            "reward_so_far": plot(step.curves.of("reward"), title="mean reward per step"),
            "agents": table(_agent_rows(step)),
            "rates": table([row for agent in report.agents.values() for row in rate_rows(agent.rates)]),
            "failures": table(
                [{"cause": name, "episodes": n} for name, n in sorted(report.failures.items())]
            ),
            "duration_s": step.seconds,
        },
    )


def _counts(step: CommittedStep) -> dict[str, Any]:
    report = step.report
    return {
        "policy_versions": ", ".join(f"{name}@{version}" for name, version in step.behavior_versions.items()),
        "num_tasks": report.num_tasks,
        "num_groups": report.num_groups,
        "num_invocations": report.num_invocations,
        "num_prompt_tokens": report.num_prompt_tokens,
        "num_completion_tokens": report.num_completion_tokens,
    }


def _agent_rows(step: CommittedStep) -> list[dict[str, Any]]:
    return [
        {
            "agent": name,
            "policy": step.system.agents.get(name),
            "calls": agent.num_calls,
            "tokens": agent.num_tokens,
            "mean_reward": ratio(agent.reward),
        }
        for name, agent in step.report.agents.items()
    ]
