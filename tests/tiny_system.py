"""A two-agent system with tiny models, for tests that run real processes."""

from __future__ import annotations

import time
from typing import Any

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.workload import (
    Agent,
    Demonstration,
    Optimizer,
    Policy,
    RandomModel,
    Sampling,
    Score,
    Tokenizer,
    Training,
    Workload,
)

MODEL = RandomModel(
    architecture="qwen3",
    config={
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    tokenizer=Tokenizer(
        special=("<pad>", "<user>", "<assistant>", "<end>", "<unk>"),
        words=tuple("abcdefgh "),
        pattern=".",
        chat_template="{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<assistant>",
        stop="<end>",
        unknown="<unk>",
    ),
)
POLICY = Policy(model=MODEL, algorithm=Grpo(), optimizer=Optimizer(learning_rate=1e-2))


async def solve(task: Any, team: Any) -> Any:
    return await team.critic(task.prompt, team.writer(task.prompt))


async def fragile(task: Any, team: Any) -> Any:
    """Raises for one task, names an unknown agent for another."""
    if task.prompt == "a":
        raise ZeroDivisionError("this task is broken")
    if task.prompt == "c":
        return await team.writr(task.prompt)
    return await solve(task, team)


async def block(task: Any, team: Any) -> Any:
    time.sleep(600)  # noqa: ASYNC251 - what a careless user does


def score(task: Any, episode: Any) -> Score:
    """The share of 'a' in the writer's text; the critic's own text must not be empty."""
    (writer,) = episode.of("writer")
    share = writer.text.count("a") / max(1, len(writer.text))
    return Score(
        team=share, agents={"critic": float(bool(episode.result.text))}, metrics={"writer/a": (share, 1)}
    )


def rows(letters: str) -> Any:
    return lambda: [{"prompt": letter, "answer": letter, "data_source": "letters"} for letter in letters]


def demonstrate(num: int, seed: int) -> Any:
    for _ in range(num):
        yield Demonstration(agent="writer", arguments=("a",), answer="ab")
        yield Demonstration(agent="critic", arguments=("a", "ab"), answer="a")


def make(**overrides: Any) -> Workload:
    values: dict[str, Any] = {
        "name": "letters",
        "policies": {"writer": POLICY, "critic": POLICY},
        "agents": {
            "writer": Agent(policy="writer", prompt=lambda text: text, sampling=Sampling(max_tokens=6)),
            "critic": Agent(
                policy="critic", prompt=lambda *texts: " ".join(texts), sampling=Sampling(max_tokens=4)
            ),
        },
        "workflow": solve,
        "reward": score,
        "tasks": rows("abcdefgh"),
        "eval_tasks": rows("ab"),
        "demonstrate": demonstrate,
        "training": Training(
            tasks_per_step=3, group_size=3, micro_batch_groups=1, warm_examples=16, warm_batch=8, eval_draws=1
        ),
    }
    return Workload(**{**values, **overrides})


workload = make()
broken = make(workflow=fragile, training=Training(tasks_per_step=8, group_size=2))
blocking = make(
    workflow=block,
    eval_tasks=rows("a"),
    training=Training(tasks_per_step=1, group_size=2, episode_timeout_s=2.0),
)
empty = make(tasks=rows(""))
no_prompt = make(tasks=lambda: [{"answer": "a"}])
