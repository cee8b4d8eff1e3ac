"""The DeepSpeed config of a learner: a user's raw config, completed by what the system owns.

No deepspeed here: a config can be checked where it is not installed.
"""

from __future__ import annotations

import copy
from typing import Any

from megloom.compute.workload import Optimizer
from megloom.compute.workload import Trainer as TrainerKnobs

_CONDUCTOR = "micro-batches are the conductor's; `trainer.budget_tokens` bounds a pass"
_FLOAT32 = "weights and gradient sums are float32; for bfloat16 arithmetic set torch_autocast"
OWNED = {  # key → what to set instead
    "train_batch_size": _CONDUCTOR,
    "train_micro_batch_size_per_gpu": _CONDUCTOR,
    "gradient_accumulation_steps": _CONDUCTOR,
    "managed_gradient_accumulation": "the optimizer boundary is the conductor's",
    "optimizer": "set the policy's `optimizer`",
    "scheduler": "set the policy's `optimizer`: warmup_steps, total_steps",
    "gradient_clipping": "set the policy's `optimizer`: grad_clip",
    "zero_optimization.stage": "set `trainer.zero_stage`",
    "fp16": _FLOAT32,
    "bf16": _FLOAT32,
    "amp": _FLOAT32,
    "data_types": _FLOAT32,
}


def deepspeed_config(knobs: TrainerKnobs, optimizer: Optimizer) -> dict[str, Any]:
    """The whole config. `knobs.deepspeed` is merged in as it is, nested dicts included.

    Raises: ValueError naming the key and what to set instead, if it sets what the system owns.
    """
    raw = copy.deepcopy(knobs.deepspeed)
    for key, instead in OWNED.items():
        if _is_set(raw, key):
            raise ValueError(f"trainer.deepspeed sets {key}, which the system owns: {instead}")
    if knobs.zero_stage == 0 and _is_set(raw, "torch_autocast"):
        raise ValueError("trainer.deepspeed sets torch_autocast, which needs zero_stage 1 or more")
    # At stage 0 the learner reduces and clips by itself: the engine would neither sum nor report a norm.
    clip = optimizer.grad_clip if knobs.zero_stage else 0.0
    owned: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": clip,
    }
    defaults: dict[str, Any] = {
        "zero_allow_untested_optimizer": True,  # torch's AdamW; DeepSpeed's own must be compiled
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    zero = {**raw.get("zero_optimization", {}), "stage": knobs.zero_stage}
    return {**defaults, **raw, **owned, "zero_optimization": zero}


def _is_set(raw: dict[str, Any], key: str) -> bool:
    outer, _, inner = key.partition(".")
    return outer in raw and (not inner or inner in raw[outer])
