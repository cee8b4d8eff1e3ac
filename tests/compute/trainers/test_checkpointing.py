"""The knob `gradient_checkpointing`: activations are computed twice, the gradient keeps its bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.trainers.deepspeed_import import GATHER_WARNING
from megloom.compute.trainers.protocol import TrainingRow
from megloom.compute.trainers.replica import Replica

from .builders import batch, ragged_rows, replica, row, same_bits, state_tensors

pytestmark = pytest.mark.filterwarnings(f"ignore:{GATHER_WARNING}:FutureWarning")
LORA = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}}
NUM_LAYERS = 2


def zero(stage: int) -> dict[str, Any]:
    return {"backend": "deepspeed", "zero_stage": stage}


def branches() -> list[TrainingRow]:
    """Rows with a common prompt, which is computed once."""
    made = [row(seed, num_prompt=20, num_sampled=6, episode_id="e") for seed in range(50, 54)]
    prompt = made[0].token_ids[:20]
    return [replace(one, token_ids=np.concatenate([prompt, one.token_ids[20:]])) for one in made]


PARTS = [batch([*ragged_rows(6), *branches()], name="first"), batch(ragged_rows(9)[3:], name="second")]


def trained(folder: Path, knobs: dict[str, Any], *, is_checkpointed: bool) -> tuple[Replica, list[int]]:
    """A replica whose second batch is open, and the layer of each forward pass in that batch.

    The first update moves LoRA's B off zero, without which A has no gradient.
    """
    trainer = replica(
        folder,
        trainer={**knobs, "budget_tokens": 64, "gradient_checkpointing": is_checkpointed},
        algorithm=Grpo(entropy=0.01).model_dump(),
    )
    trainer.forward_backward(PARTS[0])
    trainer.optim_step(scale=0.01)
    assert trainer._state is not None
    layers: list[int] = []
    for number, layer in enumerate(trainer._state.learner.model.base_model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: layers.append(number))
    for part in PARTS:
        trainer.forward_backward(part)
    return trainer, layers


def both(folder: Path, knobs: dict[str, Any]) -> tuple[Replica, Replica]:
    """Without and with checkpointing, which has gone through each layer twice as often."""
    plain, layers = trained(folder / "off", knobs, is_checkpointed=False)
    checkpointed, twice = trained(folder / "on", knobs, is_checkpointed=True)
    counts = [layers.count(number) for number in range(NUM_LAYERS)]
    assert min(counts) > 1 and [twice.count(number) for number in range(NUM_LAYERS)] == [
        2 * count for count in counts
    ]
    return plain, checkpointed


def under(prefix: str, trainer: Replica, folder: Path) -> dict[str, Tensor]:
    found = {name: value for name, value in state_tensors(trainer, folder).items() if name.startswith(prefix)}
    assert found and all(value.any() for value in found.values())
    return found


@pytest.mark.parametrize(
    "knobs",
    [{}, LORA, zero(1), pytest.param({**LORA, **zero(1)}, marks=pytest.mark.slow)],
    ids=["torch", "lora", "zero-1", "lora at zero-1"],
)
def test_the_sums_are_the_same_with_and_without_it(tmp_path: Path, knobs: dict[str, Any]) -> None:
    plain, checkpointed = both(tmp_path, knobs)
    sums = [under("sums/", trainer, tmp_path) for trainer in (plain, checkpointed)]
    assert same_bits(*sums)
    assert all((".lora_" in name) == ("lora" in knobs) for name in sums[0])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_update_is_the_same_with_and_without_it_where_sums_are_in_parts(
    tmp_path: Path, stage: int
) -> None:
    """The first moment is the gradients of both updates, weighed."""
    trainers = both(tmp_path, zero(stage))
    for trainer in trainers:
        trainer.optim_step(scale=0.01)
    plain, checkpointed = (under("optimizer/exp_avg/", trainer, tmp_path) for trainer in trainers)
    assert same_bits(checkpointed, plain)
