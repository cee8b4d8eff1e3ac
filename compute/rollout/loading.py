"""Loads a workload by its name and reports what was loaded: the plan, and the hashes of the code."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

from megloom.compute.graph.seeds import content_hash
from megloom.compute.importing import import_workload
from megloom.compute.rollout.protocol import AgentPlan, WorkloadError, WorkloadPlan
from megloom.compute.workload import Workload


def load_workload(name: str) -> Workload:
    """Imports `package.module:attribute`.

    Raises: WorkloadError naming what is missing, or what the import raised.
    """
    try:
        return import_workload(name)
    except ValueError as error:
        raise WorkloadError(str(error)) from error


def plan_of(workload: Workload, *, modules: tuple[str, ...]) -> WorkloadPlan:
    """The workload as plain data, with the hash of each named module's source file."""
    return WorkloadPlan(
        name=workload.name,
        policies={name: policy.model_dump(mode="json") for name, policy in workload.policies.items()},
        agents={
            name: AgentPlan(
                policy=agent.policy,
                max_tokens=agent.sampling.max_tokens,
                temperature=agent.sampling.temperature,
            )
            for name, agent in workload.agents.items()
        },
        training=workload.training.model_dump(mode="json"),
        has_demonstrations=workload.demonstrate is not None,
        reward_hash=reward_hash(workload),
        code_hashes={name: module_hash(name) for name in modules},
        uses_gateway=workload.uses_gateway,
        leaf_classes=workload.leaf_classes,
    )


def code_modules(workload: Workload, name: str) -> tuple[str, ...]:
    """The modules whose code the run depends on: the system's file and those of its functions."""
    names = {name.partition(":")[0]}
    for function in (workload.workflow, workload.reward, workload.demonstrate, *workload.fields.values()):
        module = inspect.getmodule(function) if function is not None else None
        if module is not None:
            names.add(module.__name__)
    return tuple(sorted(names))


def module_hash(module_name: str) -> str:
    """16 hex digits of the module's source file as it was imported."""
    file = getattr(sys.modules[module_name], "__file__", None)
    if file is None:
        return "interactive"
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def reward_hash(workload: Workload) -> str:
    """The hash of the reward function's source: another reward is another lineage."""
    return content_hash(inspect.getsource(workload.reward))


def dataset_key(source: Any, workload_name: str) -> str:
    """A cache key of a dataset function: its workload and its module's code, so that an edit builds anew."""
    code = module_hash(workload_name.partition(":")[0])
    return content_hash([workload_name, getattr(source, "__qualname__", repr(source)), code])
