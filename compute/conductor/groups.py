"""A session's training groups, and the trainer cells that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from megloom.compute.conductor.backend import Backend
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.rollout.protocol import WorkloadPlan
from megloom.compute.scheduling.trainer_cells import Rules, TrainerCell
from megloom.compute.trainers.cells import TrainerCells
from megloom.compute.trainers.group import TrainingGroup
from megloom.compute.trainers.protocol import TrainerPlan
from megloom.compute.workload import Trainer as TrainerKnobs


def make_groups(
    plan: WorkloadPlan,
    *,
    config: SessionConfig,
    backend: Backend,
    tasks: asyncio.TaskGroup,
    clock: Clock,
    events: EventLog,
) -> dict[str, TrainingGroup]:
    """A group for each policy; none has a process yet.

    Raises: ValueError for knobs that cannot work together.
    """
    knobs = {
        policy: TrainerKnobs.parse(spec["trainer"])
        for policy, spec in plan.policies.items()
        if spec["trained"]
    }
    cells = TrainerCells(
        trainer_cells(config.cells.trainers, knobs),
        clock=clock,
        rules=Rules(idle_s=config.cells.trainer_idle_s),
    )
    return {
        policy: TrainingGroup(
            trainer_plan(plan, policy, config),
            cells=cells,
            starter=backend,
            shelf=backend.shelf,
            tasks=tasks,
            clock=clock,
            tell=events.add,
        )
        for policy in plan.policies
    }


def trainer_cells(number: int | None, knobs: Mapping[str, TrainerKnobs]) -> list[TrainerCell]:
    """So many cells (None: one for each replica) for the trained policies' groups.

    Raises: ValueError if policies that keep theirs in mid-batch (ZeRO 2 and 3) would leave none for others.
    """
    if number is None:
        number = max(1, sum(knob.replicas for knob in knobs.values()))
    keepers = sorted(p for p, knob in knobs.items() if knob.backend == "deepspeed" and knob.zero_stage >= 2)
    needed = len(keepers) + (len(keepers) < len(knobs))
    if keepers and number < needed:
        raise ValueError(
            f"cells.trainers {number}, expected at least {needed}: {', '.join(keepers)} keep theirs in "
            "mid-batch (zero_stage 2 and 3), and a step ends when all policies have taken their gradients"
        )
    return [TrainerCell(name=f"trainers/{position}") for position in range(number)]


def trainer_plan(plan: WorkloadPlan, policy: str, config: SessionConfig) -> TrainerPlan:
    """What a replica of the policy is told."""
    spec = plan.policies[policy]
    return TrainerPlan(
        policy=policy,
        model=spec["model"],
        algorithm=spec["algorithm"],
        optimizer=spec["optimizer"],
        warm_optimizer=spec["warm_optimizer"],
        seed=derive_seed(config.seed, "model", policy) % 2**31,
        device=config.cells.device,
        threads=config.cells.threads,
        trainer=spec["trainer"],
        publishing=spec["publishing"],
        max_off_policy_steps=spec["max_off_policy_steps"],
    )
