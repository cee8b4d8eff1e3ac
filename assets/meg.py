"""The step's part of the execution graph, sealed in the store: every agent call and what it waited for."""

from __future__ import annotations

import dagster as dg

from megloom.assets.metadata import table
from megloom.assets.partitions import train_step
from megloom.assets.step import (
    CODE_VERSION,
    CommittedStep,
    asset_key,
    materialization,
    meg_version,
    rollout_version,
)
from megloom.assets.system import System


def specs(system: System) -> list[dg.AssetSpec]:
    return [
        dg.AssetSpec(
            asset_key(system, "meg_partition"),
            deps=[asset_key(system, "rollout_batch")],
            description="Agent calls, edges, tokens and samples of the step: Parquet under one manifest.",
            group_name=system.name,
            kinds={"parquet", "duckdb"},
            code_version=CODE_VERSION,
            partitions_def=train_step,
        )
    ]


def event(step: CommittedStep) -> dg.AssetMaterialization:
    report = step.report
    return materialization(
        step,
        "meg_partition",
        data_version=meg_version(report),
        inputs={asset_key(step.system, "rollout_batch"): rollout_version(report)},
        metadata={
            "dagster/row_count": report.num_invocations,
            "dagster/uri": report.meg_uri,
            "num_episodes": report.num_episodes,
            "samples": table(
                [
                    {"policy": name, "samples": policy.num_samples, "trainable_tokens": policy.num_trainable}
                    for name, policy in report.policies.items()
                ]
            ),
            "code_hash": report.code_hash,
            "epoch": report.epoch,
            "duration_s": step.seconds,
        },
    )
