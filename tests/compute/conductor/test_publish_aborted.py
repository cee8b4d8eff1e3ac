"""A session whose publish is aborted ends; nothing has moved, and the run goes on with the same number."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megloom.compute.conductor.session import Session
from megloom.compute.conductor.stager import ChunkStager
from megloom.compute.conductor.version_services import VersionServices, local_services
from megloom.compute.simulation.cells import ModelledEngine
from megloom.compute.state.weights import MODEL_FILE, complete_versions, read_manifest, version_dir
from megloom.compute.store.offload import Offload
from megloom.compute.store.reader import MegReader
from tests.compute.conductor.test_publisher import FlakyNode
from tests.compute.conductor.test_rollback import RUN, live, newest, versions_by_step
from tests.kills.cells import FileBackend

CHUNK_BYTES = 7  # a version of `FileTrainer` is a number of up to 19 digits: three chunks
BROKEN = "engine/solver/1"


class WatchedBackend(FileBackend):
    """Keeps the engines of all cells, dead or alive."""

    def __init__(self, *args: Any, engines: dict[str, ModelledEngine], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engines = engines

    async def start_engine(self, name: str, *, policy: str, uri: str, version: int) -> ModelledEngine:
        engine = self.engines[name] = await super().start_engine(
            name, policy=policy, uri=uri, version=version
        )
        return engine


def on_nodes(home: Path, nodes: dict[str, FlakyNode]) -> Callable[..., VersionServices]:
    """Every engine has a disk of its own; the broken one fails at chunk 2 of 3 of its second version."""

    def node_of(cell: str) -> FlakyNode:
        if cell not in nodes:
            flaky = {"at_chunk": 5, "times": 10**6} if cell == BROKEN else {}
            nodes[cell] = FlakyNode(home / "nodes" / cell, **flaky)
        return nodes[cell]

    def make(folder_of: Callable[[str], str], offload: Offload) -> VersionServices:
        stager = ChunkStager(node_of=node_of, offload=offload, chunk_bytes=CHUNK_BYTES)
        return VersionServices(keeper=local_services(folder_of, offload).keeper, stager=stager)

    return make


def all_weights(session: Session, policy: str) -> dict[int, str]:
    """By version."""
    folder = Path(session.paths.weights(policy))
    return {
        version: (version_dir(folder, version) / MODEL_FILE).read_text()
        for version in complete_versions(folder)
    }


def test_a_session_ends_with_an_aborted_publish_and_a_resume_publishes_the_same_number(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    engines: dict[str, ModelledEngine] = {}
    nodes: dict[str, FlakyNode] = {}
    events: list[str] = []
    failed = live(
        home,
        3,
        engines_per_policy=2,
        make_backend=lambda *args, **kwargs: WatchedBackend(*args, engines=engines, **kwargs),
        make_services=on_nodes(home, nodes),
        events=events,
    )
    assert failed.state == "failed" and failed.failure is not None
    assert failed.failure.startswith(
        "PublishAborted: publish of solver@2 aborted, the old version serves on: engine/solver/1: "
    )
    assert failed.failure.endswith("No space left on device (3 tries)")
    told = [json.loads(line) for line in events]
    assert [(e["policy"], e["version"]) for e in told if e["kind"] == "publish_aborted"] == [("solver", 2)]
    assert nodes[BROKEN].chunks == [0, 7, 14, 0], "a whole version, and one chunk of the next"

    versions = {"planner": 1, "solver": 1, "verifier": 1}
    assert failed.status().versions == newest(home).ledger.versions() == versions
    assert [report.step for report in failed.reports] == [0, 1]
    for cell in ("engine/solver/0", BROKEN):
        info = asyncio.run(engines[cell].info())
        assert (info.version, info.paused) == (1, False), cell
    folder = Path(failed.paths.weights("solver"))
    assert complete_versions(folder) == [0, 1, 2], "the trainer had made it; no ledger has it"

    resumed = live(home, 3, engines_per_policy=2)
    straight = live(tmp_path / "straight", 3, engines_per_policy=2)
    assert (resumed.failure, straight.failure) == (None, None)
    assert versions_by_step(resumed.reports, "solver") == [0, 1, 2, 3]
    for policy in versions:
        assert all_weights(resumed, policy) == all_weights(straight, policy)
    assert read_manifest(version_dir(folder, 2)).digest == resumed.reports[2].policies["solver"].digest
    samples = MegReader(resumed.paths.store_root).read_table(RUN, "samples", steps=[2, 3]).to_pylist()
    sampled_by = {(s["step"], s["version_min"]) for s in samples if s["policy"] == "solver"}
    assert sampled_by == {(2, 1), (3, 2)}
