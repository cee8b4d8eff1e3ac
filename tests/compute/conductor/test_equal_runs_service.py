"""What must not change the numbers: satellites, and taking gradients while other episodes still run.

Real engines, trainers and workers. An engine with one slot computes each call by itself and in order, so that
both runs sample the same tokens to the bit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from megloom.compute.conductor.client import ServiceClient
from megloom.compute.conductor.config import Cells
from megloom.compute.conductor.reports import StepReport
from megloom.compute.conductor.run import RunPaths
from megloom.compute.graph.schemas import from_table
from megloom.compute.state.weights import MODEL_FILE, version_dir
from megloom.compute.store.reader import MegReader
from tests.replicas_system import LEARNING_RATE
from tests.service_fixture import config, follow, service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
POLICIES = ("writer", "critic")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with service(tmp_path_factory.mktemp("home")) as running:
        yield running


def finished(
    client: ServiceClient, run: str, steps: int, *, module: str = "tiny_system", **settings: Any
) -> list[StepReport]:
    workload = settings.pop("workload", "workload")
    settings["workload"] = f"tests.{module}:{workload}"
    client.start_session(config(run, steps).model_copy(update=settings))
    status, reports = follow(client, run)
    assert (status.state, status.failure) == ("finished", None)
    return reports


def samples(client: ServiceClient, run: str) -> dict[str, tuple[Any, ...]]:
    """What the trainers were given."""
    reader = MegReader(str(client.home / "store"))
    records = from_table("samples", reader.read_table(run, "samples"))
    return {r.sample_id: (r.advantage, r.reward, r.num_tokens, r.state) for r in records}


def weights(client: ServiceClient, run: str, policy: str, version: int) -> npt.NDArray[np.float64]:
    """All weights of a version in one line."""
    folder = Path(RunPaths(home=client.home, run=run).weights(policy))
    tensors = load_file(version_dir(folder, version) / MODEL_FILE)
    return np.concatenate([tensors[name].ravel().astype(np.float64) for name in sorted(tensors)])


def kinds(client: ServiceClient, run: str) -> Counter[str]:
    lines = (client.home / "runs" / run / "events.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["kind"] for line in lines)


def test_a_session_with_satellites_ends_with_the_weights_of_one_without(client: ServiceClient) -> None:
    steps = 2
    ends = {}
    for run, cells in (("alone", Cells(engine_slots=1)), ("helped", Cells(engine_slots=1, trainers=4))):
        reports = finished(
            client, run, steps, module="replicas_system", workload=run, mode="sync", cells=cells
        )
        assert [r.policies["writer"].version for r in reports] == [0, 1, 2]
        ends[run] = {policy: weights(client, run, policy, steps) for policy in POLICIES}
    assert kinds(client, "helped")["satellite_joined"] >= 1 and not kinds(client, "alone")["satellite_joined"]
    assert samples(client, "alone") == samples(client, "helped")
    reader = MegReader(str(client.home / "store"))
    batches = from_table("micro_batches", reader.read_table("helped", "micro_batches"))
    cells_of = Counter(batch.cell for batch in batches)
    assert sum(number for cell, number in cells_of.items() if "." in cell) >= 1, cells_of
    for policy in POLICIES:
        moved = ends["alone"][policy] - weights(client, "alone", policy, 0)
        gap = ends["alone"][policy] - ends["helped"][policy]
        assert np.abs(moved).max() > 0.9 * LEARNING_RATE and np.abs(gap).max() <= 1e-5
        assert np.linalg.norm(gap) <= 1e-4 * np.linalg.norm(moved)


def num_early_gradients(reports: list[StepReport]) -> int:
    """Gradients that were begun while calls of their step still ran."""
    early = 0
    for report in reports[1:]:
        ends = [bar["end_s"] for bar in report.timeline if bar["activity"] == "roll"]
        starts = [bar["start_s"] for bar in report.timeline if bar["activity"] == "gradient"]
        early += sum(start < max(ends) for start in starts)
    return early


def test_frozen_and_sync_mode_publish_the_same_weights_to_the_bit(client: ServiceClient) -> None:
    """Three steps after a warm start; what was sampled in them is the same too."""
    digests, given, early = {}, {}, {}
    for mode in ("frozen", "sync"):
        reports = finished(client, mode, 3, mode=mode, cells=Cells(engine_slots=1))
        digests[mode] = [report.policies[policy].digest for report in reports for policy in POLICIES]
        given[mode], early[mode] = samples(client, mode), num_early_gradients(reports)
    assert given["frozen"] == given["sync"]
    assert digests["frozen"] == digests["sync"] and len(set(digests["frozen"])) >= 6
    assert early["frozen"] >= 3 and early["sync"] == 0
