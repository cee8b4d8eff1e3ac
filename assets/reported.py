"""What a Dagster instance already knows of a run, so that a session is never reported twice.

A session outlives the op that reports it: after a retry, a re-execution or a restart the op attaches again.
The events of a step are separate transactions; `behavior_policy` of the next step is written last, so its
partition says that the step is complete. Only the step after those may be reported in part.
"""

from __future__ import annotations

import dagster as dg

from megloom.assets import checks
from megloom.assets.commit import Event
from megloom.assets.partitions import split_step_key, step_key
from megloom.assets.step import asset_key
from megloom.assets.system import System

Identity = dg.AssetKey | dg.AssetCheckKey
_RECENT_RUNS = 100  # task sets looked through for the run's own; they carry no partition to filter by


def last_complete_step(instance: dg.DagsterInstance, system: System, run: str) -> int:
    """The last step whose events were all reported; −1 if there is none."""
    keys = instance.get_materialized_partitions(asset_key(system, "behavior_policy"))
    steps = [step for key_run, step in map(split_step_key, keys) if key_run == run]
    return max(steps, default=0) - 1


def reported_parts(instance: dg.DagsterInstance, system: System, run: str, step: int) -> set[Identity]:
    """The assets and checks of one step that were reported, its next behaviour policy left out."""
    partition = step_key(run, step)
    keys = [asset_key(system, *parts) for parts in _parts(system)]
    found: set[Identity] = {
        key
        for key in keys
        if instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition]), limit=1
        ).records
    }
    graph = asset_key(system, "meg_partition")
    for key in (dg.AssetCheckKey(graph, name) for name in (checks.CONSISTENT, checks.HEALTHY)):
        latest = instance.get_latest_asset_check_evaluation_record(key)
        evaluation = latest and latest.event and latest.event.asset_check_evaluation
        if evaluation and evaluation.partition == partition:
            found.add(key)
    if step == 0 and _tasks_reported(instance, system, run):
        found.add(asset_key(system, "tasks"))
    return found


def identity(event: Event) -> Identity:
    """What `reported_parts` would list an event as."""
    return event.asset_check_key if isinstance(event, dg.AssetCheckEvaluation) else event.asset_key


def _parts(system: System) -> list[tuple[str, ...]]:
    per_policy = [("policy_version", policy) for policy in system.policies]
    gradients = [("micro_batch_gradients", policy) for policy in system.trained_policies]
    return [
        ("rollout_batch",),
        ("meg_partition",),
        *gradients,
        *per_policy,
        ("evaluation",),
        ("cluster_report",),
    ]


def _tasks_reported(instance: dg.DagsterInstance, system: System, run: str) -> bool:
    records = instance.fetch_materializations(asset_key(system, "tasks"), limit=_RECENT_RUNS).records
    events = [record.asset_materialization for record in records]
    return any(event and (event.tags or {}).get("megloom/run") == run[:63] for event in events)
