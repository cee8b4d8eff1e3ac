import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from megloom.compute.closed import Closed
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.reports import CheckReport
from megloom.pipelines.jobs import TrainingSessionConfig, training_session_job
from megloom.resources.compute_service import ComputeService
from tests.fake_service import WORKLOAD, FakeService, serving, step_report, step_reports


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def stored_instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """On SQLite files, as in real use; slower to make."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield instance


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    with serving(FakeService(tmp_path / "home", step_reports(2))) as service:
        yield service


def run_job(service: FakeService, instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    values = {"workload": WORKLOAD, "run": "demo", "steps": 2, **config}
    return training_session_job.execute_in_process(
        run_config={"ops": {"training_session": {"config": values}}},
        resources={"service": ComputeService(home=str(service.home), autostart=False)},
        instance=instance,
        raise_on_error=False,
    )


def reported(instance: dg.DagsterInstance, run_id: str) -> list[tuple[str, str | None]]:
    """The asset events of a run in order: what, and in which partition."""
    found = []
    for entry in instance.all_logs(run_id):
        event = entry.dagster_event
        if entry.asset_materialization is not None:
            materialization = entry.asset_materialization
            found.append(("/".join(materialization.asset_key.path[1:]), materialization.partition))
        elif event is not None and event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            evaluation = event.asset_check_evaluation_data
            found.append((evaluation.check_name, evaluation.partition))
    return found


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    """The description and the cause of the failed op."""
    return next(
        f"{event.step_failure_data.user_failure_data} {event.step_failure_data.error}"
        for event in result.all_events
        if event.is_step_failure
    )


def test_a_session_reports_each_step_once_in_order_and_in_its_partition(
    service: FakeService, instance: dg.DagsterInstance
):
    result = run_job(service, instance)
    assert result.success
    events = reported(instance, result.run_id)
    assert len(events) == len(set(events))
    per_step = Counter(partition for name, partition in events if name != "behavior_policy")
    assert per_step == {None: 1, "demo:000000": 8, "demo:000001": 11, "demo:000002": 12}
    assert [partition for name, partition in events if name == "behavior_policy"] == [
        "demo:000001",
        "demo:000002",
        "demo:000003",
    ]
    assert instance.get_dynamic_partitions("train_step") == [f"demo:{step:06d}" for step in range(4)]


def test_the_service_gets_the_typed_config(service: FakeService, instance: dg.DagsterInstance):
    run_job(service, instance, seed=7, mode="sync", training={"group_size": 4}, cells={"threads": 2})
    config = SessionConfig.parse(service.started[0])
    assert (config.run, config.steps, config.seed, config.mode) == ("demo", 2, 7, "sync")
    assert (config.training.group_size, config.training.tasks_per_step, config.cells.threads) == (4, None, 2)


def test_the_run_is_tagged_with_the_session(service: FakeService, instance: dg.DagsterInstance):
    run = instance.get_run_by_id(run_job(service, instance).run_id)
    assert run is not None
    assert (run.tags["megloom/run"], run.tags["megloom/system"]) == ("demo", "standin_team")
    assert run.tags["megloom/config_hash"] == SessionConfig.parse(service.started[0]).config_hash()


def test_a_run_without_a_name_gets_one_from_its_dagster_run(
    service: FakeService, instance: dg.DagsterInstance
):
    result = run_job(service, instance, run="")
    assert service.started[0]["run"] == f"run-{result.run_id[:8]}"


def test_attaching_again_reports_only_the_steps_that_are_new(
    service: FakeService, stored_instance: dg.DagsterInstance
):
    first = reported(stored_instance, run_job(service, stored_instance).run_id)
    service.reports = step_reports(3)
    second = reported(stored_instance, run_job(service, stored_instance, steps=3).run_id)
    assert {partition for _, partition in second} == {"demo:000003", "demo:000004"}
    assert not set(first) & set(second)
    assert len(stored_instance.get_dynamic_partitions("train_step")) == 5


def test_another_run_of_the_same_system_is_reported_from_its_start(
    service: FakeService, instance: dg.DagsterInstance
):
    run_job(service, instance)
    service.reports = step_reports(2, run="other")
    events = reported(instance, run_job(service, instance, run="other").run_id)
    assert ("tasks", None) in events
    assert ("rollout_batch", "other:000001") in events


@pytest.mark.parametrize("num_events", [0, 1, 5, 7, 8, 9])
def test_a_step_that_was_cut_off_in_the_middle_is_completed_not_repeated(
    service: FakeService, instance: dg.DagsterInstance, num_events: int, monkeypatch: pytest.MonkeyPatch
):
    service.reports = step_reports(0)
    cut_off(monkeypatch, num_events)
    first = reported(instance, run_job(service, instance, steps=0).run_id)
    monkeypatch.undo()
    second = reported(instance, run_job(service, instance, steps=0).run_id)
    assert len(first) == num_events and len(second) == 10 - num_events
    assert len(set(first) | set(second)) == 10


def cut_off(monkeypatch: pytest.MonkeyPatch, num_events: int) -> None:
    """Ends the op with a failure after so many events, as the death of its process would."""
    log_event, written = dg.OpExecutionContext.log_event, []

    def log_event_until_cut(context: dg.OpExecutionContext, event: Any) -> None:
        if len(written) == num_events:
            raise dg.Failure("cut", allow_retries=False)
        written.append(event)
        log_event(context, event)

    monkeypatch.setattr(dg.OpExecutionContext, "log_event", log_event_until_cut)


def test_a_failed_blocking_check_is_reported_then_fails_the_run(
    service: FakeService, instance: dg.DagsterInstance
):
    failed = CheckReport(name="finite_gradient", passed=False, blocking=True, detail="solver: nan")
    service.reports = [step_report(0), step_report(1, checks=[failed])]
    result = run_job(service, instance)
    assert not result.success
    assert "finite_gradient: solver: nan" in failure_of(result)
    events = reported(instance, result.run_id)
    assert events[-1] == ("step_is_healthy", "demo:000001")
    assert ("behavior_policy", "demo:000002") not in events
    assert len(service.started) == 1  # not retried


def test_a_failed_session_fails_the_run_with_the_text_of_the_service(
    service: FakeService, instance: dg.DagsterInstance
):
    service.failure = "trainer of solver lost: exit code -9"
    result = run_job(service, instance)
    assert not result.success
    assert "session demo failed after step 2: trainer of solver lost: exit code -9" in failure_of(result)
    assert len(service.started) == 1
    assert ("behavior_policy", "demo:000003") in reported(instance, result.run_id)


def test_a_session_that_someone_else_cancelled_fails_the_run(
    service: FakeService, instance: dg.DagsterInstance
):
    service.cancelled.append("demo")
    assert "cancelled by another client" in failure_of(run_job(service, instance))


def test_a_refused_session_fails_the_run_without_a_retry(service: FakeService, instance: dg.DagsterInstance):
    service.refusal = "run demo exists with another config"
    result = run_job(service, instance)
    assert "409: run demo exists with another config" in failure_of(result)
    assert not any(event.is_step_up_for_retry for event in result.all_events)


def test_a_lost_service_is_retried_and_attached_to_again(
    service: FakeService, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    address = service.home / "service.json"
    text = address.read_text()
    service.num_released = 1
    monkeypatch.setattr(time, "sleep", lambda seconds: (address.write_text(text), service.release(3)))
    service.on_steps = lambda num_polls: address.unlink() if num_polls == 1 else None
    result = run_job(service, instance)
    assert result.success
    assert sum(event.is_step_up_for_retry for event in result.all_events) == 1
    events = reported(instance, result.run_id)
    assert len(events) == len(set(events)) and ("rollout_batch", "demo:000002") in events


def test_an_interrupt_of_the_run_cancels_the_session(service: FakeService, instance: dg.DagsterInstance):
    service.num_released = 1
    service.on_steps = lambda num_polls: os.kill(os.getpid(), signal.SIGINT) if num_polls == 2 else None
    result = run_job(service, instance)
    assert not result.success and "Interrupted" in failure_of(result)
    assert service.cancelled == ["demo"]
    assert len(service.started) == 1  # a cancelled run must not start again


def test_an_ordinary_error_leaves_the_session_to_its_lease(
    service: FakeService, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    cut_off(monkeypatch, 2)
    assert not run_job(service, instance).success
    assert service.cancelled == []


def test_a_paused_session_is_continued(service: FakeService, instance: dg.DagsterInstance):
    def pause_once(num_polls: int) -> None:
        service.paused = num_polls == 1
        service.num_released = 1 if num_polls == 1 else 3

    service.on_steps = pause_once
    assert run_job(service, instance).success
    assert len(service.started) == 2


def test_what_a_session_waits_for_is_logged_once(service: FakeService, instance: dg.DagsterInstance):
    service.waiting_for = "episode e7: planner"
    service.num_released = 1
    service.on_steps = lambda num_polls: service.release(num_polls)
    result = run_job(service, instance)
    logs = [
        entry.user_message for entry in instance.all_logs(result.run_id) if "waits for" in entry.user_message
    ]
    assert logs == ["session run=demo waits for episode e7: planner"]


@pytest.mark.parametrize(
    "config", [{"stepz": 3}, {"training": {"groups": 3}}, {"mode": "fast"}, {"steps": "ten"}]
)
def test_a_config_that_the_launchpad_would_refuse_does_not_start(
    service: FakeService, instance: dg.DagsterInstance, config: dict[str, Any]
):
    with pytest.raises(dg.DagsterInvalidConfigError):
        run_job(service, instance, **config)
    assert service.started == []


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"run": "two words"}, "run: "),
        ({"training": {"group_size": 1}}, "training.group_size: "),
        ({"workload": "tests.nowhere:workload"}, "No module named"),
    ],
)
def test_a_value_out_of_range_fails_the_run_before_a_session_starts(
    service: FakeService, instance: dg.DagsterInstance, config: dict[str, Any], cause: str
):
    assert cause in failure_of(run_job(service, instance, **config))
    assert service.started == []


def test_the_launchpad_config_has_the_fields_and_defaults_of_the_session_config():
    assert_mirrors(TrainingSessionConfig, SessionConfig, own_defaults={"workload", "run", "steps"})


def assert_mirrors(edge: type[dg.Config], inner: type[Closed], own_defaults: set[str]) -> None:
    assert edge.model_fields.keys() == inner.model_fields.keys()
    for name, field in edge.model_fields.items():
        mirrored = inner.model_fields[name]
        assert field.description, f"{edge.__name__}.{name} has no description for the Launchpad"
        if isinstance(mirrored.annotation, type) and issubclass(mirrored.annotation, Closed):
            assert isinstance(field.annotation, type) and issubclass(field.annotation, dg.Config)
            assert_mirrors(field.annotation, mirrored.annotation, own_defaults=set())
        elif name not in own_defaults:
            default = field.get_default()
            assert (tuple(default) if isinstance(default, list) else default) == mirrored.get_default(), name


def test_every_field_of_the_config_has_a_default():
    assert TrainingSessionConfig().steps == 10
