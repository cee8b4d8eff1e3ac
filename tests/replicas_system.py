"""The tiny system with models that compute for a while, so that a satellite finds work; alone and with one.

The learning rate is small: AdamW divides by a gradient's size, and where that is next to nothing the noise of
float sums decides in which direction a weight goes.
"""

from __future__ import annotations

from dataclasses import replace

from megloom.compute.workload import Optimizer, Trainer, Training, Workload
from tests import tiny_system

LEARNING_RATE = 1e-4
_MODEL = tiny_system.MODEL.model_copy(
    update={"config": {**tiny_system.MODEL.config, "hidden_size": 64, "num_hidden_layers": 6}}
)
_TRAINING = Training(tasks_per_step=16, group_size=8, micro_batch_groups=1, warm_examples=0, eval_draws=1)


def _with_replicas(number: int) -> Workload:
    policy = tiny_system.POLICY.model_copy(
        update={
            "model": _MODEL,
            "optimizer": Optimizer(learning_rate=LEARNING_RATE),
            "trainer": Trainer(replicas=number, budget_tokens=16),  # a pass for every row
        }
    )
    return replace(tiny_system.workload, policies={"writer": policy, "critic": policy}, training=_TRAINING)


alone, helped = _with_replicas(1), _with_replicas(2)
