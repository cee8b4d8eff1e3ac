"""A policy's gradient in a step: the micro-batches that were summed while other episodes still ran."""

from __future__ import annotations

import dagster as dg

from megloom.assets.metadata import MAX_ROWS, table
from megloom.assets.partitions import train_step
from megloom.assets.step import (
    CODE_VERSION,
    CommittedStep,
    asset_key,
    gradient_version,
    materialization,
    meg_version,
)
from megloom.assets.system import System


def specs(system: System) -> list[dg.AssetSpec]:
    """One asset per trained policy; a frozen one has no gradient."""
    return [
        dg.AssetSpec(
            asset_key(system, "micro_batch_gradients", policy),
            deps=[asset_key(system, "meg_partition")],
            description=f"Micro-batches whose raw gradient sums make the step's one update of {policy}.",
            group_name=system.name,
            kinds={"gradient", "torch"},
            code_version=CODE_VERSION,
            partitions_def=train_step,
        )
        for policy in system.trained_policies
    ]


def event(step: CommittedStep, policy: str) -> dg.AssetMaterialization:
    """The micro-batches are rows of one table, never events; those past the table are counted."""
    report = step.report.policies[policy]
    return materialization(
        step,
        "micro_batch_gradients",
        policy,
        data_version=gradient_version(step.report, policy),
        policy_version=step.behavior_versions[policy],
        inputs={asset_key(step.system, "meg_partition"): meg_version(step.report)},
        metadata={
            "dagster/row_count": report.num_micro_batches,
            "num_samples": report.num_samples,
            "num_trainable_tokens": report.num_trainable,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "max_logprob_gap": report.max_logprob_gap,
            "max_off_policy_steps": report.max_off_policy_steps,
            "base_version": step.behavior_versions[policy],
            "micro_batches": table(report.micro_batches),
            "micro_batches_not_shown": max(0, report.num_micro_batches - MAX_ROWS) or None,
        },
    )
