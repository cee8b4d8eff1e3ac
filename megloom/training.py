"""Trains through Dagster's `training_session_job` on the user's instance; shows steps as they come."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megloom.compute.conductor.client import ServiceClient, ServiceError, ensure_service
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.reports import ENDED, StepReport
from megloom.progress import ProgressTable

POLL_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """How a run ended. `failure` is the session's or the job's cause, None if it finished."""

    table: ProgressTable
    reports: list[StepReport]
    wall_s: float
    failure: str | None


def train(config: SessionConfig, *, home: Path) -> Trained:
    """Runs the job to its end in this process; an interrupt cancels the session."""
    started = time.monotonic()
    # A service that boots while Dagster is imported (seconds) is ready when the job asks for it.
    booting = threading.Thread(target=ensure_service, args=(home,), name="boot-service", daemon=True)
    booting.start()
    follower = _Follower(config.run, home)
    follower.start()
    failure = _run_job(config, home)
    follower.finish()
    booting.join(timeout=POLL_S)
    return Trained(
        table=follower.table,
        reports=follower.reports,
        wall_s=time.monotonic() - started,
        failure=failure or follower.failure,
    )


class _Follower(threading.Thread):
    """Prints a run's steps: a client of its own, beside the job's."""

    def __init__(self, run: str, home: Path) -> None:
        super().__init__(name="progress", daemon=True)
        self.table, self.reports = ProgressTable(), list[StepReport]()
        self.failure: str | None = None
        self._run, self._client = run, ServiceClient(home)
        self._ended = threading.Event()

    def run(self) -> None:
        waited_for = None
        while True:
            job_is_over = self._ended.is_set()  # asked first: an ended session may be an earlier one
            try:
                page = self._client.steps(self._run, after=self.table.last_step, wait_s=POLL_S)
            except ServiceError:
                if job_is_over:
                    return  # no session is there: it never began
                self._ended.wait(0.2)
                continue
            for report in page.steps:
                self.reports.append(report)
                for line in self.table.lines(report):
                    print(line, flush=True)
            if page.status.state == "starting" and page.status.waiting_for != waited_for:
                waited_for = page.status.waiting_for
                print(f"starting: waiting for {waited_for}", file=sys.stderr, flush=True)
            if page.status.state in ENDED:
                self.failure = page.status.failure
                if job_is_over:
                    return
                self._ended.wait(0.2)

    def finish(self) -> None:
        """Waits for the last step's line."""
        self._ended.set()
        self.join(timeout=30.0)


def _run_job(config: SessionConfig, home: Path) -> str | None:
    """Runs the job in-process; returns the cause if it failed."""
    warnings.filterwarnings("ignore", module="dagster.*")
    import dagster as dg

    from megloom.pipelines.jobs import training_session_job
    from megloom.resources.compute_service import ComputeService

    logging.getLogger("dagster").setLevel(logging.ERROR)
    with dg.DagsterInstance.get() as instance:
        result = training_session_job.execute_in_process(
            instance=instance,
            run_config=_run_config(config),
            resources={"service": ComputeService(home=str(home))},
            raise_on_error=False,
            tags={"megloom/run": config.run},
        )
    if result.success:
        return None
    failures = [event for event in result.all_events if event.is_step_failure]
    for event in failures:
        data: Any = event.step_failure_data
        if data.user_failure_data is not None and data.user_failure_data.description:
            return str(data.user_failure_data.description)
        if data.error is not None:
            return str(data.error.message).strip()
    return "the Dagster run failed without a step failure: see megloom ui"


def _run_config(config: SessionConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    values["training"] = {k: v for k, v in values["training"].items() if v is not None}
    if "paths_per_episode" in values["training"]:  # Dagster knows no "number or text"
        values["training"]["paths_per_episode"] = str(values["training"]["paths_per_episode"])
    values = {key: value for key, value in values.items() if value is not None}
    return {
        "ops": {"training_session": {"config": values}},
        "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},  # the cause is printed once, by us
    }
