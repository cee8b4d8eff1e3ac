"""CPU of reporting one training step to Dagster, on SQLite files, against plain events in the same run.

The session is a scripted one (three policies, checks, evaluation); the cost includes the scripted service's
own thread. `vs_plain_events` compares a step to as many bare `report_runless_asset_event` calls. Prints one
JSON object `{figure: {value, unit, target, ok}}`. Run from the root of a checkout.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dagster as dg

sys.path.insert(0, str(Path(__file__).parents[1]))

from megloom.pipelines.jobs import training_session_job
from megloom.resources.compute_service import ComputeService
from tests.fake_service import WORKLOAD, FakeService, serving, step_reports

NUM_STEPS, FIRST_COUNTED = 30, 5  # the first steps create tables and fill caches
EVENTS_PER_STEP = 13
TARGET_CPU_S = 0.25


def figure(value: float, unit: str, target: float | None = None) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "target": target, "ok": target and value <= target}


def report_session(home: Path, instance: dg.DagsterInstance) -> float:
    """CPU seconds of one step, by the polls of the job."""
    marks: list[float] = []
    with serving(FakeService(home, step_reports(NUM_STEPS))) as service:
        service.num_released = 1

        def mark(num_polls: int) -> None:
            marks.append(time.process_time())
            service.num_released = num_polls

        service.on_steps = mark
        config = {"workload": WORKLOAD, "run": "bench", "steps": NUM_STEPS}
        result = training_session_job.execute_in_process(
            run_config={
                "ops": {"training_session": {"config": config}},
                "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
            },
            resources={"service": ComputeService(home=str(service.home), autostart=False)},
            instance=instance,
        )
    assert result.success
    return (marks[NUM_STEPS] - marks[FIRST_COUNTED]) / (NUM_STEPS - FIRST_COUNTED)


def plain_events(instance: dg.DagsterInstance) -> float:
    """CPU seconds of as many bare events as a step has."""
    started = time.process_time()
    for _ in range(5 * EVENTS_PER_STEP):
        instance.report_runless_asset_event(dg.AssetMaterialization("plain", metadata={"value": 1.0}))
    return (time.process_time() - started) / 5


def main() -> None:
    """Runs the benchmark and prints its figures."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dagster").mkdir()
        with dg.DagsterInstance.local_temp(f"{folder}/dagster") as instance:
            step_s = report_session(Path(folder) / "home", instance)
            plain_s = plain_events(instance)
    figures = {
        "cpu_s_per_step": figure(step_s, "s", TARGET_CPU_S),
        "vs_plain_events": figure(step_s / plain_s, "ratio"),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
