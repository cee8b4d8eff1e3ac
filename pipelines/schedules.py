"""Schedules, stopped until someone starts them."""

import dagster as dg

from megloom.pipelines.jobs import TrainingSessionConfig, training_session_job

NIGHTLY_STEPS = 100


@dg.schedule(
    job=training_session_job,
    cron_schedule="0 3 * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Trains the default system from scratch each night, under a name made from the date.",
)
def nightly_retrain(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
    """The date is both the run's key, so that a tick counts once, and its seed, so that nights differ."""
    night = context.scheduled_execution_time.strftime("%Y%m%d")
    config = TrainingSessionConfig(run=f"nightly-{night}", steps=NIGHTLY_STEPS, seed=int(night))
    return dg.RunRequest(
        run_key=f"nightly-{night}", run_config=dg.RunConfig(ops={"training_session": config})
    )
