"""Two checks per step, on the step's graph partition: one that ends the session, one that warns.

The service decides what passed; here its verdicts become one event each, with a row per verdict. Both can be
run again from the UI: the latest step's report is read back from the service and judged anew.

No postponed annotations here: Dagster reads the signatures, and does not resolve text.
"""

from collections.abc import Iterator

import dagster as dg

from megloom.assets.metadata import entries, table
from megloom.assets.partitions import split_step_key, step_key
from megloom.assets.step import asset_key
from megloom.assets.system import System
from megloom.compute.conductor.reports import CheckReport, StepReport
from megloom.resources.compute_service import ComputeService

CONSISTENT = "step_is_consistent"
HEALTHY = "step_is_healthy"


def failed_blocking(report: StepReport) -> list[CheckReport]:
    return [check for check in report.checks if check.blocking and not check.passed]


def results(system: System, report: StepReport) -> list[dg.AssetCheckResult]:
    """The blocking result, then the warning one; each passes if all of its verdicts did."""
    return [_result(system, report, CONSISTENT), _result(system, report, HEALTHY)]


def events(system: System, report: StepReport) -> list[dg.AssetCheckEvaluation]:
    """The same as events of the step's partition.

    The partition is a must: without it a run keeps one row per check, and each step would overwrite the last.
    """
    return [
        dg.AssetCheckEvaluation(
            asset_key=asset_key(system, "meg_partition"),
            check_name=result.check_name or "",
            passed=result.passed,
            severity=result.severity,
            description=result.description,
            metadata=result.metadata,
            blocking=result.check_name == CONSISTENT,
            partition=step_key(report.run, report.step),
        )
        for result in results(system, report)
    ]


def definition(system: System) -> dg.AssetChecksDefinition:
    key = asset_key(system, "meg_partition")
    specs = [
        dg.AssetCheckSpec(CONSISTENT, asset=key, blocking=True, description="Ends the session if it fails."),
        dg.AssetCheckSpec(HEALTHY, asset=key, description="Warns; the session goes on."),
    ]

    @dg.multi_asset_check(name=f"{system.name}_latest_step", specs=specs, can_subset=True)
    def judge_latest_step(
        context: dg.AssetCheckExecutionContext, service: ComputeService
    ) -> Iterator[dg.AssetCheckResult]:
        latest = context.instance.get_latest_materialization_event(key)
        if latest is None or latest.asset_materialization is None:
            raise dg.Failure(f"{key.to_user_string()} was never materialized", allow_retries=False)
        run, step = split_step_key(latest.asset_materialization.partition or "")
        report = service.connect().steps(run, after=step - 1, wait_s=0).steps[0]
        wanted = {key.name for key in context.selected_asset_check_keys}
        yield from (result for result in results(system, report) if result.check_name in wanted)

    return judge_latest_step


def _result(system: System, report: StepReport, name: str) -> dg.AssetCheckResult:
    checks = [check for check in report.checks if check.blocking == (name == CONSISTENT)]
    failed = [check.name for check in checks if not check.passed]
    return dg.AssetCheckResult(
        asset_key=asset_key(system, "meg_partition"),
        check_name=name,
        passed=not failed,
        severity=dg.AssetCheckSeverity.ERROR if name == CONSISTENT else dg.AssetCheckSeverity.WARN,
        description=f"failed: {', '.join(failed)}" if failed else f"{len(checks)} of {len(checks)} passed",
        metadata=entries(
            {
                "step": step_key(report.run, report.step),
                "verdicts": table(
                    [{"check": c.name, "passed": c.passed, "detail": c.detail} for c in checks]
                ),
            }
        ),
    )
