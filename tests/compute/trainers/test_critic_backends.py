"""A policy with a critic trains alike on plain torch and on every ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.state.weights import MODEL_FILE
from megloom.compute.trainers.critic import CRITIC_FILE
from megloom.compute.trainers.deepspeed_import import GATHER_WARNING

from .builders import batch, ragged_rows, replica, with_critic_columns

pytestmark = pytest.mark.filterwarnings(f"ignore:{GATHER_WARNING}:FutureWarning")
ROWS = with_critic_columns(ragged_rows(8))


def trained(folder: Path, knobs: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    """Weights, critic included, and gradient norms after a step on rewards and one on demonstrations."""
    trainer = replica(folder / "w", algorithm=Ppo(entropy=0.01).model_dump(), trainer=knobs)
    norms = []
    for loss in ("policy_gradient", "imitation"):
        trainer.forward_backward(batch(ROWS, name=loss, loss=loss))
        norms.append(trainer.optim_step(scale=0.01).grad_norm)
    values = trainer.forward(batch(ROWS), ["values"]).columns["values"]
    norms.append(float(sum(float(one.sum()) for one in values)))
    version = Path(trainer.publish(weights_dir=str(folder / "out"), version=1).uri)
    trainer.close()
    return {**load_file(version / MODEL_FILE), **load_file(version / CRITIC_FILE)}, norms


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2, 3))])
def test_a_critic_trains_alike_on_every_backend(tmp_path: Path, stage: int) -> None:
    ours, norms = trained(tmp_path / "torch", {})
    theirs, their_norms = trained(tmp_path / "zero", {"backend": "deepspeed", "zero_stage": stage})
    assert "value_head.weight" in ours and ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    assert norms == pytest.approx(their_norms, rel=1e-4)
