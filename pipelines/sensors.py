"""Sensors, stopped until someone starts them.

No postponed annotations here: Dagster reads the signatures, and does not resolve text.
"""

import json

import dagster as dg

from megloom.assets.metadata import table
from megloom.compute.conductor.client import ServiceClient, ServiceError
from megloom.resources.compute_service import ComputeService

compute_service = dg.AssetSpec(
    "compute_service",
    description="The process that samples and trains, and the sessions that it holds.",
    group_name="service",
    kinds={"python"},
)


@dg.sensor(
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.STOPPED,
    description="Observes the compute service and its sessions; an event only when something changed.",
)
def service_health(
    context: dg.SensorEvaluationContext, service: ComputeService
) -> dg.SensorResult | dg.SkipReason:
    """Never starts the service: a sensor looks, it does not act."""
    health, states = _look(ServiceClient(service.home_path))
    seen = json.dumps([health, states], sort_keys=True)
    if seen == context.cursor:
        return dg.SkipReason(f"unchanged: service {health}, {len(states)} sessions")
    sessions = table([{"run": run, "state": state} for run, state in states.items()])
    observation = dg.AssetObservation(
        compute_service.key,
        metadata={
            "health": health,
            "home": str(service.home_path),
            **({"sessions": sessions} if sessions else {}),
        },
    )
    return dg.SensorResult(asset_events=[observation], cursor=seen)


def _look(client: ServiceClient) -> tuple[str, dict[str, str]]:
    """Whether the service is up, and the state of each session."""
    try:
        return "up", {status.run: status.state for status in client.sessions()}
    except ServiceError as error:
        return f"down: {error}", {}
