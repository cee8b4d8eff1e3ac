"""What a start of a session runs: its config, the code its workers loaded, the packages, as one record."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib import metadata

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.graph.records import ProvenanceRecord
from megloom.compute.graph.seeds import canonical_json
from megloom.compute.rollout.protocol import WorkloadPlan

PACKAGES: Sequence[str] = ("megloom", "torch", "transformers", "tokenizers", "numpy", "sglang", "deepspeed")


def provenance(
    *, config: SessionConfig, plan: WorkloadPlan, code_hash: str, epoch: int, step: int, started_at: str
) -> ProvenanceRecord:
    """The record of the start with `epoch`, whose first step is `step`."""
    return ProvenanceRecord(
        run=config.run,
        epoch=epoch,
        step=step,
        workload=config.workload,
        config_hash=config.config_hash(),
        config=canonical_json(config.model_dump(mode="json")),
        code_hash=code_hash,
        code_hashes=canonical_json(plan.code_hashes),
        reward_hash=plan.reward_hash,
        packages=json.dumps(package_versions(), sort_keys=True),
        started_at=started_at,
    )


def package_versions() -> dict[str, str]:
    """The installed versions of what shapes a result, and of Python; absent packages are left out."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
