"""The system's task set: training and held-out rows. Reported once per run, with its first step."""

from __future__ import annotations

import dagster as dg

from megloom.assets.metadata import entries
from megloom.assets.step import CODE_VERSION, CommittedStep, asset_key, event_tags, tasks_version
from megloom.assets.system import System


def specs(system: System) -> list[dg.AssetSpec]:
    """Not partitioned: the rows are the same in every step, a step draws some of them."""
    return [
        dg.AssetSpec(
            asset_key(system, "tasks"),
            description="Rows that the system is trained on and held-out rows that it is measured on.",
            group_name=system.name,
            kinds={"parquet"},
            code_version=CODE_VERSION,
        )
    ]


def event(step: CommittedStep) -> dg.AssetMaterialization:
    status = step.status
    return dg.AssetMaterialization(
        asset_key=asset_key(step.system, "tasks"),
        metadata=entries(
            {
                "dagster/row_count": status.num_tasks,
                "num_eval_tasks": status.num_eval_tasks,
                "workload": status.workload,
                "store_root": dg.MetadataValue.path(status.store_root),
            }
        ),
        tags=event_tags(step, data_version=tasks_version(step)),
    )
