"""What the cells did in a step: seconds by activity, throughput, and the timeline of cells and roles."""

from __future__ import annotations

import dagster as dg

from megloom.assets.metadata import table
from megloom.assets.partitions import train_step
from megloom.assets.pictures import COLOUR_NAMES, OTHER_NAME, timeline
from megloom.assets.step import (
    CODE_VERSION,
    CommittedStep,
    asset_key,
    fingerprint,
    materialization,
    meg_version,
)
from megloom.assets.system import System


def specs(system: System) -> list[dg.AssetSpec]:
    return [
        dg.AssetSpec(
            asset_key(system, "cluster_report"),
            deps=[asset_key(system, "meg_partition")],
            description="Seconds that the cells spent sampling, on gradients, on updates and on publishing.",
            group_name=system.name,
            kinds={"python"},
            code_version=CODE_VERSION,
            partitions_def=train_step,
        )
    ]


def event(step: CommittedStep) -> dg.AssetMaterialization:
    report = step.report
    seconds = report.seconds_by_activity
    busy_s = sum(seconds.values())
    return materialization(
        step,
        "cluster_report",
        data_version=fingerprint(report.meg_uri, report.epoch, "cluster"),
        inputs={asset_key(step.system, "meg_partition"): meg_version(report)},
        metadata={
            "duration_s": step.seconds,
            "finished_at": report.wall_time,
            "completion_tokens_per_s": report.num_completion_tokens / step.seconds
            if step.seconds > 0
            else None,
            "timeline": timeline(step.report.timeline, title="cells and what they did"),
            "activities": table(
                [
                    {
                        "colour": COLOUR_NAMES.get(name, OTHER_NAME),
                        "activity": name,
                        "seconds": value,
                        "share": value / busy_s if busy_s else None,
                    }
                    for name, value in seconds.items()
                ]
            ),
        },
    )
