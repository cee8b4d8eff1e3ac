"""The tiny system with much of the training engine at once: critic, ZeRO, adapters, deltas, scored calls.

The writer has a value head and a KL term and trains on DeepSpeed; the critic is called twice, is scored for
each call, trains adapters and is published rounded, every third version whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megloom.compute.algorithms.base import Gspo, Kl
from megloom.compute.algorithms.hierarchical_grpo import HierarchicalGrpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.workload import Lora, Policy, Publishing, Score, Trainer
from tests import tiny_system

POLICIES: dict[str, Policy] = {
    "writer": tiny_system.POLICY.model_copy(
        update={
            "algorithm": Ppo(kl=Kl(coefficient=0.05)),
            "trainer": Trainer(backend="deepspeed", zero_stage=1),
        }
    ),
    "critic": tiny_system.POLICY.model_copy(
        update={
            "algorithm": HierarchicalGrpo(surrogate=Gspo(form="token", token_cap=5.0)),
            "trainer": Trainer(lora=Lora(rank=2, alpha=4.0)),
            "publishing": Publishing(dtype="bfloat16", anchor_every=3),
        }
    ),
}


async def discuss(task: Any, team: Any) -> Any:
    draft = team.writer(task.prompt)
    return await team.critic(task.prompt, draft, team.critic(task.prompt, draft))


def _share(text: str, letter: str) -> float:
    return text.count(letter) / max(1, len(text))


def score(task: Any, episode: Any) -> Score:
    """The writer earns for 'a', the critic's calls each for their own 'b'."""
    (writer,) = episode.of("writer")
    calls = {call.invocation_id: _share(call.text, "b") for call in episode.of("critic")}
    return Score(team=_share(writer.text, "a"), calls=calls)


workload = replace(tiny_system.workload, name="losses", policies=POLICIES, workflow=discuss, reward=score)
