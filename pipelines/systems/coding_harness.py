"""A finished coding agent, mini-swe-agent, trained as it is: it repairs small repositories in a shell.

The program runs unchanged, once for each episode, and calls the episode's endpoint; only its configuration
file is ours. Needs the extra `harness`. The model is tiny and trained from scratch: its tokenizer knows the
words of these tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.workload import (
    Agent,
    HarnessResult,
    Optimizer,
    Policy,
    ProgramLimits,
    RandomModel,
    Sampling,
    Score,
    Tokenizer,
    Training,
    Workload,
)
from megloom.pipelines.systems.coding_tasks import (
    ARGUMENTS,
    FILE,
    NAMES,
    NUMBERS,
    OPERATORS,
    Bug,
    Grade,
    GraderError,
    bug_of,
    grade,
    held_out_rows,
    teach,
    train_rows,
)

SYSTEM = "repair"
TRAJECTORY = "trajectory.json"
CONFIG = {
    "agent": {
        "agent_class": "default",
        "system_template": SYSTEM,
        "instance_template": "{{task}}",
        "step_limit": 3,
        "cost_limit": 0,
        "max_consecutive_format_errors": 2,
    },
    "environment": {"environment_class": "local", "timeout": 5},
    "model": {
        "model_class": "litellm_textbased",
        "model_name": "openai/coder",
        "cost_tracking": "ignore_errors",
        "action_regex": r"^\$ (.+)$",
        "observation_template": "exit {{output.returncode}}",
        "format_error_template": "exit none",
    },
}
QUIET = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "true",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
    "PYTHONDONTWRITEBYTECODE": "1",
}
PROGRAM_S = 60.0
LIMITS = ProgramLimits(disk_bytes=16 << 20, file_bytes=8 << 20, collected_bytes=4 << 20)
RAN, CHANGED = 0.1, 0.1  # credit for a command that ran, and for another file that still works

WORDS = (
    *("sed", "-i", "echo", "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", FILE, "returns", "should", "be"),
    *(f"'s/{argument}" for argument in ARGUMENTS),
    *(f"{number}/{argument}" for number in NUMBERS for argument in ARGUMENTS),
    *(f"{number}/'" for number in NUMBERS),
    *(*OPERATORS, *ARGUMENTS, *map(str, range(10)), "none", "126", "127", "-1"),
)
MODEL = RandomModel(
    architecture="qwen3",
    config={
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    tokenizer=Tokenizer(
        special=("<pad>", "<system>", "<user>", "<assistant>", "<end>", "<unk>"),
        words=("$", SYSTEM, "exit", *NAMES, *(f" {word}" for word in WORDS)),
        pattern=" ?[^ <>]+",
        chat_template=(
            "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
            "{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}<assistant>"
        ),
        stop="<end>",
        unknown="<unk>",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """What an episode came to: `num_commands` is how many the program ran, `grade` what it left is worth.

    Without a verdict `grade` is what kept the grader from one.
    """

    program: HarnessResult
    num_commands: int
    has_changed: bool
    grade: Grade | GraderError


def prompt(issue: str, *turns: str) -> list[dict[str, str]]:
    """The messages that the program sends after these turns: its answers and what came of them."""
    roles = ("assistant", "user")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": issue}]
    return messages + [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]


async def repair(task: Any, team: Any) -> Repair:
    """Lets the program work on the repository, then runs the hidden tests on what it left."""
    bug = bug_of(task.row)
    program = await team.run(
        ("mini", "-c", "agent.yaml", "-t", bug.issue, "-y", "--exit-immediately", "-o", TRAJECTORY),
        agent="coder",
        files={**bug.files, "agent.yaml": json.dumps(CONFIG)},
        env=QUIET,
        keep=(FILE, TRAJECTORY),
        timeout_s=PROGRAM_S,
        limits=LIMITS,
    )
    code = program.workspace.get(FILE)
    return Repair(
        program=program,
        num_commands=commands_in(program.workspace.get(TRAJECTORY, b"")),
        has_changed=code != bug.files[FILE].encode(),
        grade=await _graded(bug, code),
    )


async def _graded(bug: Bug, code: bytes | None) -> Grade | GraderError:
    """The grade, or why there is none: the reward raises it, so that the episode counts as unscorable."""
    try:
        return await grade(bug, code)
    except GraderError as error:
        return error


def commands_in(trajectory: bytes) -> int:
    """How many commands the program ran, by its own record; 0 without one."""
    try:
        messages = json.loads(trajectory)["messages"]
        return sum("returncode" in message.get("extra", {}) for message in messages)
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0


def score(task: Any, episode: Any) -> Score:
    """1 for a repaired repository; a little for a command that ran, and for a changed file that works.

    Raises: GraderError if the grader came to no verdict.
    """
    found: Repair | None = episode.result
    if found is None:
        raise GraderError("the episode ended before its files were graded")
    if isinstance(found.grade, GraderError):
        raise found.grade
    is_solved = found.grade.passed == 1.0
    partly = RAN * (found.num_commands > 0) + CHANGED * (found.has_changed and found.grade.works)
    metrics: Mapping[str, tuple[float, int]] = {
        "coder/solved": (float(is_solved), 1),
        "coder/ran_a_command": (float(found.num_commands > 0), 1),
        "coder/commands": (float(found.num_commands), 1),
        "coder/timed_out": (float(found.program.timed_out), 1),
    }
    return Score(team=1.0 if is_solved else partly, metrics=metrics)


workload = Workload(
    name="coding_harness",
    policies={
        "coder": Policy(
            model=MODEL,
            algorithm=Grpo(),
            optimizer=Optimizer(learning_rate=5e-4, betas=(0.9, 0.99), warmup_steps=2),
            warm_optimizer=Optimizer(
                learning_rate=1e-2, betas=(0.9, 0.98), weight_decay=0.01, warmup_steps=10, total_steps=130
            ),
        )
    },
    agents={"coder": Agent(policy="coder", prompt=prompt, sampling=Sampling(max_tokens=24))},
    workflow=repair,
    reward=score,
    tasks=train_rows,
    eval_tasks=held_out_rows,
    demonstrate=teach,
    uses_gateway=True,
    training=Training(
        tasks_per_step=2,
        group_size=4,
        micro_batch_groups=1,
        warm_examples=4096,
        warm_batch=32,
        eval_every=0,
        eval_small=10,
        eval_draws=1,
        episode_timeout_s=180.0,
    ),
)
