"""Modelled cells whose trainers leave real files: weight versions and states, as the torch trainer does."""

from __future__ import annotations

import json
from pathlib import Path

from megloom.compute.graph.seeds import derive_seed
from megloom.compute.simulation.backend import ModelledBackend
from megloom.compute.simulation.cells import Costs
from megloom.compute.simulation.trainers import ModelledTrainer
from megloom.compute.state.durable import replace_file
from megloom.compute.state.weights import MODEL_FILE, put_version, read_manifest, version_dir
from megloom.compute.trainers.protocol import (
    GradientReport,
    MicroBatch,
    Published,
    TrainerError,
    TrainerPlan,
    UpdateReport,
)

MODULUS = 2**62


class FileTrainer(ModelledTrainer):
    """A trainer whose weights are one number: the sum over every row that an update ever consumed.

    A row that is lost or counted twice changes all later weights, and so every later digest in the ledger.
    The order of rows does not matter, as in a real accumulation.
    """

    def __init__(self, plan: TrainerPlan, costs: Costs) -> None:
        super().__init__(plan, costs)
        self._weights, self._gradient, self._version = 0, 0, 0

    async def create(self, weights_dir: str) -> Published:
        return self._put(Path(weights_dir), 0, parent=None)

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        await super().load(weights_uri=weights_uri, state_path=state_path)
        manifest = read_manifest(Path(weights_uri))
        self._weights, self._gradient = int((Path(weights_uri) / MODEL_FILE).read_text()), 0
        self._version = manifest.version
        if state_path is not None and read_state(Path(state_path)) != (self._version, self._weights):
            raise TrainerError(f"state {state_path} does not belong to {weights_uri}")

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        report = await super().forward_backward(batch)
        for row in batch.rows:
            self._gradient += derive_seed(row.sample_id, repr(row.advantage), *row.token_ids.tolist())
        return report

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        report = await super().optim_step(scale=scale, warm=warm)
        self._weights, self._gradient = (self._weights + self._gradient) % MODULUS, 0
        return report

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        await super().publish(weights_dir=weights_dir, version=version)
        published = self._put(Path(weights_dir), version, parent=self._version)
        self._version = version
        return published

    async def save(self, *, state_path: str) -> None:
        facts = {"version": self._version, "weights": self._weights}
        replace_file(Path(state_path), lambda path: path.write_text(json.dumps(facts)))

    def _put(self, folder: Path, version: int, *, parent: int | None) -> Published:
        manifest = put_version(
            folder,
            version,
            policy=self._plan.policy,
            parent_version=parent,
            write=lambda staging: (staging / MODEL_FILE).write_bytes(str(self._weights).encode()),
        )
        return Published(
            uri=str(version_dir(folder, version)),
            version=version,
            digest=manifest.digest,
            size_bytes=manifest.size_bytes,
        )


def read_state(path: Path) -> tuple[int, int]:
    """The version and the weights that a state belongs to."""
    facts = json.loads(path.read_text())
    return facts["version"], facts["weights"]


class FileBackend(ModelledBackend):
    """Modelled cells with `FileTrainer`s."""

    def _make_trainer(self, name: str, plan: TrainerPlan) -> FileTrainer:
        return FileTrainer(plan, self._costs)
