from pathlib import Path

import dagster as dg

from megloom.pipelines.sensors import service_health
from megloom.resources.compute_service import ComputeService
from tests.fake_service import WORKLOAD, FakeService, serving


def look(home: Path, cursor: str | None = None) -> dg.SensorResult | dg.SkipReason:
    resources = {"service": ComputeService(home=str(home))}
    with dg.build_sensor_context(cursor=cursor, resources=resources) as context:
        result = service_health(context)
    assert isinstance(result, dg.SensorResult | dg.SkipReason)
    return result


def observation(result: dg.SensorResult | dg.SkipReason) -> dg.AssetObservation:
    assert isinstance(result, dg.SensorResult)
    (event,) = result.asset_events
    assert isinstance(event, dg.AssetObservation)
    return event


def test_the_sensor_is_stopped_until_someone_starts_it():
    assert service_health.default_status is dg.DefaultSensorStatus.STOPPED


def test_a_service_that_is_down_is_observed_and_not_started(tmp_path: Path):
    health = observation(look(tmp_path)).metadata["health"]
    assert str(health.value).startswith("down: no service is running")
    assert list(tmp_path.iterdir()) == []


def test_the_sessions_of_a_running_service_are_observed(tmp_path: Path):
    with serving(FakeService(tmp_path, failure="out of memory")) as service:
        service.started.append({"run": "demo", "workload": WORKLOAD, "steps": 3})
        seen = observation(look(tmp_path))
    assert seen.metadata["health"].value == "up"
    sessions = seen.metadata["sessions"]
    assert isinstance(sessions, dg.TableMetadataValue)
    assert [record.data for record in sessions.records] == [{"run": "demo", "state": "failed"}]


def test_nothing_new_is_no_event(tmp_path: Path):
    first = look(tmp_path)
    assert isinstance(first, dg.SensorResult)
    assert isinstance(look(tmp_path, cursor=first.cursor), dg.SkipReason)
