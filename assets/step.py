"""A committed step as the asset families see it, and the versions of the data that it made.

Dagster records the inputs of an asset only for bodies that it runs itself. Events written from inside a
session carry theirs by hand, as `dagster/input_data_version/<asset>` tags.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from megloom.assets.curves import Curves
from megloom.assets.metadata import entries
from megloom.assets.partitions import step_key
from megloom.assets.system import System
from megloom.compute.conductor.reports import SessionStatus, StepReport

CODE_VERSION = "1"  # of these reports; the workload's own code is `megloom/code_hash`
_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_TAG = 63  # Dagster's limit of a tag's value


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedStep:
    """One step's report, with the session's state when it was read and the run's curves up to it."""

    system: System
    status: SessionStatus
    report: StepReport
    curves: Curves

    @property
    def seconds(self) -> float:
        return self.report.finished_s - self.report.started_s

    @property
    def behavior_versions(self) -> dict[str, int]:
        """The policy versions that sampled this step: what the step before left behind."""
        return {
            name: policy.parent_version
            if policy.trained and policy.parent_version is not None
            else policy.version
            for name, policy in self.report.policies.items()
        }

    @property
    def committed_versions(self) -> dict[str, int]:
        """The policy versions that the next step samples with."""
        return {name: policy.version for name, policy in self.report.policies.items()}


def asset_key(system: System, *parts: str) -> dg.AssetKey:
    """The key of one of the system's assets: all of them lie below the system's name."""
    return dg.AssetKey([system.name, *parts])


def fingerprint(*parts: Any) -> str:
    """A short hash of plain data, equal for equal data."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def tasks_version(step: CommittedStep) -> str:
    status = step.status
    return fingerprint(status.workload, status.code_hash, status.num_tasks, status.num_eval_tasks)


def behavior_version(run: str, versions: Mapping[str, int]) -> str:
    return fingerprint(run, dict(versions))


def rollout_version(report: StepReport) -> str:
    return fingerprint(
        report.meg_uri, report.epoch, report.reward, report.num_episodes, report.num_completion_tokens
    )


def meg_version(report: StepReport) -> str:
    samples = {name: policy.num_samples for name, policy in report.policies.items()}
    return fingerprint(report.meg_uri, report.epoch, report.num_invocations, samples)


def gradient_version(report: StepReport, policy: str) -> str:
    """Changes with the digest of the weights that the gradient made."""
    return fingerprint("gradient", report.policies[policy].digest)


def event_tags(
    step: CommittedStep,
    *,
    data_version: str,
    inputs: Mapping[dg.AssetKey, str] | None = None,
    policy_version: int | None = None,
) -> dict[str, str]:
    """The tags that tie an event to its run, step and code, and to the data that it was made from."""
    report = step.report
    tags = {
        "megloom/run": report.run,
        "megloom/step": str(report.step),
        "megloom/config_hash": report.config_hash,
        "megloom/code_hash": report.code_hash,
        "megloom/epoch": str(report.epoch),
    }
    if policy_version is not None:
        tags["megloom/version"] = str(policy_version)
    return {
        **{name: _NOT_IN_A_TAG.sub("_", value)[:_MAX_TAG] for name, value in tags.items()},
        "dagster/data_version": data_version,
        "dagster/code_version": CODE_VERSION,
        **{f"dagster/input_data_version/{key.to_user_string()}": v for key, v in (inputs or {}).items()},
    }


def materialization(
    step: CommittedStep,
    *parts: str,
    data_version: str,
    metadata: Mapping[str, Any],
    inputs: Mapping[dg.AssetKey, str] | None = None,
    policy_version: int | None = None,
) -> dg.AssetMaterialization:
    """The event of the asset named by `parts`, in the step's partition.

    `inputs` maps each asset that it was made from to the data version that it had. A URI is no legal tag
    value, so it goes into the metadata as `dagster/uri`.
    """
    return dg.AssetMaterialization(
        asset_key=asset_key(step.system, *parts),
        partition=step_key(step.report.run, step.report.step),
        metadata=entries(metadata),
        tags=event_tags(step, data_version=data_version, inputs=inputs, policy_version=policy_version),
    )
