"""Policy versions, and the set of them that the next step samples with.

`policy_version → behavior_policy → rollout_batch` closes a circle over the steps, which Dagster refuses
(dagster#15079). The circle is cut at `behavior_policy`: an external asset without upstream, whose
partition N is reported by the commit of step N − 1.
"""

from __future__ import annotations

import dagster as dg

from megloom.assets.metadata import entries, plot, table
from megloom.assets.partitions import step_key, train_step
from megloom.assets.step import (
    CODE_VERSION,
    CommittedStep,
    asset_key,
    behavior_version,
    event_tags,
    gradient_version,
    materialization,
)
from megloom.assets.system import System


def specs(system: System) -> list[dg.AssetSpec]:
    versions = [
        dg.AssetSpec(
            asset_key(system, "policy_version", policy),
            deps=[asset_key(system, "micro_batch_gradients", policy)] if trained else [],
            description=f"Committed weights of {policy}; its agents: {', '.join(system.agents_of(policy))}.",
            group_name=system.name,
            kinds={"weights", "safetensors"},
            code_version=CODE_VERSION,
            partitions_def=train_step,
        )
        for policy, trained in system.policies.items()
    ]
    behavior = dg.AssetSpec(
        asset_key(system, "behavior_policy"),
        description="The policy versions that sample the step: those that the step before committed.",
        group_name=system.name,
        kinds={"weights"},
        code_version=CODE_VERSION,
        partitions_def=train_step,
    )
    return [*versions, behavior]


def version_event(step: CommittedStep, policy: str) -> dg.AssetMaterialization:
    """Also for a policy that the step left as it was: same version, same data version, `trained` false."""
    report = step.report.policies[policy]
    gradients = asset_key(step.system, "micro_batch_gradients", policy)
    return materialization(
        step,
        "policy_version",
        policy,
        data_version=report.digest,
        policy_version=report.version,
        inputs={gradients: gradient_version(step.report, policy)} if report.num_micro_batches else None,
        metadata={
            "policy_version": report.version,
            "parent_version": report.parent_version,
            "trained": report.trained,
            "dagster/uri": report.uri,
            "digest": report.digest,
            "num_samples": report.num_samples,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "loss_so_far": plot(step.curves.of(f"loss/{policy}"), title=f"loss of {policy} per step"),
        },
    )


def behavior_event(step: CommittedStep) -> dg.AssetMaterialization:
    """The commit: partition N + 1 exists once every policy of step N is committed and its checks passed."""
    report = step.report
    return dg.AssetMaterialization(
        asset_key=asset_key(step.system, "behavior_policy"),
        partition=step_key(report.run, report.step + 1),
        tags=event_tags(step, data_version=behavior_version(report.run, step.committed_versions)),
        metadata=entries(
            {
                "committed_by": step_key(report.run, report.step),
                "policies": table(
                    [
                        {
                            "policy": name,
                            "version": policy.version,
                            "digest": policy.digest,
                            "uri": policy.uri,
                        }
                        for name, policy in report.policies.items()
                    ]
                ),
            }
        ),
    )
