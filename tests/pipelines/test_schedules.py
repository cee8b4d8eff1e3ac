from datetime import datetime

import dagster as dg

from megloom.pipelines.jobs import training_session_job
from megloom.pipelines.schedules import nightly_retrain


def requested(night: datetime) -> dg.RunRequest:
    context = dg.build_schedule_context(scheduled_execution_time=night)
    request = nightly_retrain(context)
    assert isinstance(request, dg.RunRequest)
    return request


def test_the_schedule_is_stopped_until_someone_starts_it():
    assert nightly_retrain.default_status is dg.DefaultScheduleStatus.STOPPED


def test_a_night_has_a_run_and_a_seed_of_its_own():
    request = requested(datetime(2026, 3, 1, 3))
    assert request.run_key == "nightly-20260301"
    config = request.run_config["ops"]["training_session"]["config"]
    assert (config["run"], config["seed"]) == ("nightly-20260301", 20260301)
    assert requested(datetime(2026, 3, 2, 3)).run_key != request.run_key


def test_the_job_accepts_the_config_of_the_schedule():
    assert dg.validate_run_config(training_session_job, dict(requested(datetime(2026, 3, 1, 3)).run_config))
