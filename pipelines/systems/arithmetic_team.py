"""A planner, three solvers in parallel, and a verifier that picks one try. Each role has its own policy.

The models are tiny and trained from scratch; `arithmetic_smollm2.py` is the same team on a real one.
"""

from __future__ import annotations

from typing import Any

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.workload import Agent, Optimizer, Policy, Sampling, Score, Training, Workload
from megloom.pipelines.systems.arithmetic_model import MODEL
from megloom.pipelines.systems.arithmetic_tasks import PLAN, answer_of, held_out_rows, teach, train_rows

ROLES = ("planner", "solver", "verifier")


def policy(warm_steps: int) -> Policy:
    """A role's own weights; `warm_steps` is how many optimizer steps its demonstrations make."""
    return Policy(
        model=MODEL,
        algorithm=Grpo(),
        optimizer=Optimizer(learning_rate=5e-4, betas=(0.9, 0.99), warmup_steps=3),
        warm_optimizer=Optimizer(
            learning_rate=1e-2,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            warmup_steps=20,
            total_steps=warm_steps + 1,
        ),
    )


async def solve(task: Any, team: Any) -> Any:
    """The team: passing a call into a call is an edge of the graph."""
    plan = team.planner(task.prompt)
    tries = [team.solver(task.prompt, plan) for _ in range(3)]
    return await team.verifier(task.prompt, *tries)


def score(task: Any, episode: Any) -> Score:
    """Every try is judged by its own answer, the plan by its tries, the choice by the chosen try."""
    (plan,), tries, (choice,) = (episode.of(role) for role in ROLES)
    answers = {name: answer_of(call.text) for name, call in zip("abc", tries, strict=True)}
    is_right = {name: answer == task.ground_truth for name, answer in answers.items()}
    num_right, chosen = sum(is_right.values()), is_right.get(choice.text, False)
    well_formed = PLAN.fullmatch(plan.text) is not None
    return Score(
        team=float(chosen),
        calls={
            plan.invocation_id: num_right / len(tries) if well_formed else 0.0,
            **{call.invocation_id: float(is_right[name]) for name, call in zip("abc", tries, strict=True)},
        },
        metrics={
            "planner/well_formed": (float(well_formed), 1),
            "solver/correct": (float(num_right), len(tries)),
            "solver/well_formed": (float(sum(answer != "none" for answer in answers.values())), len(tries)),
            "verifier/right_choice": (float(chosen), int(num_right > 0)),
            "verifier/by_chance": (num_right / len(tries), int(num_right > 0)),
            "verifier/well_formed": (float(choice.text in is_right), 1),
        },
    )


AGENTS = {
    "planner": Agent(policy="planner", prompt=lambda task: f"task {task}", sampling=Sampling(max_tokens=8)),
    "solver": Agent(
        policy="solver",
        prompt=lambda task, plan: f"task {task} plan {plan}",
        sampling=Sampling(max_tokens=12),
    ),
    "verifier": Agent(
        policy="verifier",
        prompt=lambda task, *tries: (
            f"task {task}" + "".join(map(" {} {}".format, "abc", map(answer_of, tries)))
        ),
        sampling=Sampling(max_tokens=3),
    ),
}

workload = Workload(
    name="arithmetic_team",
    policies={"planner": policy(185), "solver": policy(1107), "verifier": policy(185)},
    agents=AGENTS,
    workflow=solve,
    reward=score,
    tasks=train_rows,
    eval_tasks=held_out_rows,
    demonstrate=teach,
    training=Training(
        tasks_per_step=12,
        group_size=4,
        micro_batch_groups=4,
        warm_examples=5900,
        warm_batch=32,
        eval_every=20,
        eval_small=100,
        eval_draws=2,
    ),
)
