"""What a sealed step's manifest holds for the next start: one JSON object, written with the manifest.

The ledger names each policy's committed weights and trainer state and the cursor of prompts. Between two
manifests the journal holds the open step: its ended episodes stand (`restoring.py`); those in flight and
those not begun are what the cursor gives again. There is no other random state: every choice derives from the
seed and from names, and the trainers' generators are in their states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megloom.compute.conductor.ledger import Ledger
from megloom.compute.conductor.reports import StepReport
from megloom.compute.graph.seeds import content_hash


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """`tasks_hash` is of the training tasks in their order, in which the cursor counts; None in old ones."""

    ledger: Ledger
    report: StepReport
    seed: int | None
    tasks_hash: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.to_json(),
            "report": self.report.to_json(),
            "seed": self.seed,
            "tasks_hash": self.tasks_hash,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        return cls(
            ledger=Ledger.from_json(data["ledger"]),
            report=StepReport.from_json(dict(data["report"])),
            seed=data.get("seed"),
            tasks_hash=data.get("tasks_hash"),
        )


def tasks_hash(task_ids: Sequence[str]) -> str:
    """Equal for the same tasks in the same order."""
    return content_hash(list(task_ids))
