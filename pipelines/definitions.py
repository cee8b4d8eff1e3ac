"""The code location: every known system's assets, one job to train any of them, schedules and sensors."""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from megloom.assets import checks, cluster, evaluation, gradients, meg, policies, rollouts, tasks
from megloom.assets.system import System, load_system
from megloom.pipelines.jobs import DEFAULT_WORKLOAD, training_session_job
from megloom.pipelines.schedules import nightly_retrain
from megloom.pipelines.sensors import compute_service, service_health
from megloom.resources.compute_service import ComputeService

WORKLOADS = (DEFAULT_WORKLOAD,)
FAMILIES = (tasks, rollouts, meg, gradients, policies, evaluation, cluster)


def definitions_of(systems: Iterable[System]) -> dg.Definitions:
    """Everything that Dagster shows for these systems."""
    systems = list(systems)
    specs = [spec for system in systems for family in FAMILIES for spec in family.specs(system)]
    return dg.Definitions(
        assets=[*specs, compute_service],
        asset_checks=[checks.definition(system) for system in systems],
        jobs=[training_session_job],
        schedules=[nightly_retrain],
        sensors=[service_health],
        resources={"service": ComputeService()},
    )


defs = definitions_of(load_system(workload) for workload in WORKLOADS)
