"""The system measured on held-out tasks with the policy versions that a step committed."""

from __future__ import annotations

import dagster as dg

from megloom.assets.metadata import plot, rate_rows, table
from megloom.assets.partitions import train_step
from megloom.assets.step import CODE_VERSION, CommittedStep, asset_key, fingerprint, materialization
from megloom.assets.system import System
from megloom.compute.conductor.reports import EvaluationReport, ratio


def specs(system: System) -> list[dg.AssetSpec]:
    return [
        dg.AssetSpec(
            asset_key(system, "evaluation"),
            deps=[asset_key(system, "policy_version", policy) for policy in system.policies],
            description="Mean team reward and the workload's own rates on held-out tasks.",
            group_name=system.name,
            kinds={"python"},
            code_version=CODE_VERSION,
            partitions_def=train_step,
        )
    ]


def event(step: CommittedStep, evaluation: EvaluationReport) -> dg.AssetMaterialization:
    """A full pass and a small one carry different counts, so the page says which it was."""
    policies = step.report.policies
    return materialization(
        step,
        "evaluation",
        data_version=fingerprint(
            evaluation.versions, evaluation.accuracy, evaluation.num_draws, evaluation.full
        ),
        inputs={asset_key(step.system, "policy_version", name): policies[name].digest for name in policies},
        metadata={
            "accuracy": ratio(evaluation.accuracy),
            "dagster/row_count": evaluation.accuracy[1],
            "num_tasks": evaluation.num_tasks,
            "num_draws": evaluation.num_draws,
            "full": evaluation.full,
            "num_failed": evaluation.num_failed,
            "num_invocations": evaluation.num_invocations,
            "policy_versions": ", ".join(
                f"{name}@{version}" for name, version in evaluation.versions.items()
            ),
            "accuracy_so_far": plot(step.curves.of("accuracy"), title="accuracy per evaluation"),
            "rates": table(rate_rows(evaluation.rates)),
            "duration_s": evaluation.seconds,
        },
    )
