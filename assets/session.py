"""Follows a session of the service and reports each committed step to Dagster, once and in order.

The session belongs to the service. A client that dies leaves it running until its lease ends; a client that
attaches again reports what is missing. A cancelled run cancels its session for good.
"""

from __future__ import annotations

import dagster as dg

from megloom.assets import checks, reported
from megloom.assets.commit import step_events
from megloom.assets.curves import WINDOW, Curves
from megloom.assets.partitions import TRAIN_STEP, step_key
from megloom.assets.step import CommittedStep
from megloom.assets.system import System
from megloom.compute.conductor.client import ServiceClient, ServiceDown, ServiceError
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.reports import ENDED, SessionStatus, StepReport
from megloom.resources.event_log import kept_engines

POLL_S = 2.0  # of one long poll; a cancelled run is noticed at once, the bound is for lost connections


class StepReporter:
    """Writes the events of a run's steps, in order; those already complete only feed the curves."""

    def __init__(self, context: dg.OpExecutionContext, system: System, run: str) -> None:
        self.last_complete = reported.last_complete_step(context.instance, system, run)
        self._context = context
        self._system = system
        self._curves = Curves()
        self._partial = reported.reported_parts(context.instance, system, run, self.last_complete + 1)

    def report(self, status: SessionStatus, report: StepReport) -> None:
        """Adds the step's partitions, then writes its missing events.

        Raises: dg.Failure, never retried, if a blocking check of the step failed.
        """
        self._curves.add(report)
        if report.step <= self.last_complete:
            return
        step = CommittedStep(system=self._system, status=status, report=report, curves=self._curves)
        keys = [step_key(report.run, report.step), step_key(report.run, report.step + 1)]
        self._context.instance.add_dynamic_partitions(TRAIN_STEP, keys)
        for event in step_events(step):
            if reported.identity(event) not in self._partial:
                self._context.log_event(event)  # type: ignore[arg-type]  # checks are taken, not annotated
        failed = checks.failed_blocking(report)
        if failed:
            raise _failure(
                f"step {report.step} of run {report.run}: "
                + "; ".join(f"{check.name}: {check.detail}" for check in failed)
            )
        self.last_complete, self._partial = report.step, set()


def follow_session(
    context: dg.OpExecutionContext, client: ServiceClient, system: System, config: SessionConfig
) -> SessionStatus:
    """Starts the session, or attaches to it, and reports its steps until it ends; returns its last state.

    An interrupt of the run (a BaseException that is no Exception) cancels the session. An ordinary error
    leaves it to the next attempt, or to its lease.

    Raises: dg.Failure, never retried, if the session failed, was cancelled elsewhere, or was refused.
    """
    try:
        with kept_engines(context.instance):
            return _follow(context, client, system, config)
    except ServiceDown:
        raise
    except ServiceError as error:
        raise _failure(str(error)) from error
    except Exception:
        raise
    except BaseException:
        context.log.warning(f"interrupted: cancelling session run={config.run}")
        client.cancel(config.run)
        raise


def _follow(
    context: dg.OpExecutionContext, client: ServiceClient, system: System, config: SessionConfig
) -> SessionStatus:
    reporter = StepReporter(context, system, config.run)
    client.start_session(config)
    context.log.info(f"following session run={config.run} after step={reporter.last_complete}")
    after = max(-1, reporter.last_complete - WINDOW)
    waiting_for = None
    while True:
        page = client.steps(config.run, after=after, wait_s=POLL_S)
        for report in page.steps:
            reporter.report(page.status, report)
            after = report.step
        if page.status.waiting_for not in (None, waiting_for):
            waiting_for = page.status.waiting_for
            context.log.warning(f"session run={config.run} waits for {waiting_for}")
        if page.status.state == "paused":
            client.start_session(config)
        if page.status.state in ENDED and not page.steps:
            return _checked_end(page.status)


def _checked_end(status: SessionStatus) -> SessionStatus:
    if status.state == "finished":
        return status
    cause = status.failure or "cancelled by another client of the service"
    raise _failure(
        f"session {status.run} {status.state} after step {status.step}: {cause}", state=status.state
    )


def _failure(description: str, **metadata: str) -> dg.Failure:
    return dg.Failure(description, metadata=metadata, allow_retries=False)
