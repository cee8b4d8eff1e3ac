"""A policy with a critic trains alike on plain torch and on every ZeRO stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.state.weights import MODEL_FILE
from megloom.compute.trainers.critic import CRITIC_FILE
from megloom.compute.trainers.deepspeed_import import GATHER_WARNING

from .builders import batch, plan, ragged_rows, replica, with_critic_columns
from .rank_processes import RankProcesses

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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_critic_of_two_ranks_makes_the_updates_of_one_process(tmp_path: Path, stage: int) -> None:
    """A rank without a row (the micro-batch "one") waits in the value head's passes too."""
    algorithm = Ppo(entropy=0.01).model_dump()
    alone = replica(tmp_path / "w", algorithm=algorithm)
    uri = str(tmp_path / "w" / "v000000")
    knobs = {"backend": "deepspeed", "ranks": 2, "zero_stage": stage, "budget_tokens": 40}
    processes = RankProcesses()

    async def check() -> None:
        ranked, _ = await processes.start(plan(algorithm=algorithm, trainer=knobs), 2)
        await ranked.load(weights_uri=uri, state_path=None)
        for name, rows in (("one", ROWS[:1]), ("rest", ROWS[1:])):
            for loss in ("policy_gradient", "imitation"):
                taken = batch(rows, name=f"{name}-{loss}", loss=loss)
                expected, made = alone.forward_backward(taken), await ranked.forward_backward(taken)
                assert made.num_trainable == expected.num_trainable
                for metric, (total, count) in expected.sums.items():
                    if metric != "num_computed":  # ranks cut their rows into passes of their own
                        assert made.sums[metric] == (pytest.approx(total, rel=1e-4, abs=1e-4), count)
        update, expected_update = await ranked.optim_step(scale=0.01), alone.optim_step(scale=0.01)
        assert update.grad_norm == pytest.approx(expected_update.grad_norm, rel=1e-5)
        columns = (await ranked.forward(batch(ROWS), ["values"])).columns["values"]
        for values, expected_values in zip(
            columns, alone.forward(batch(ROWS), ["values"]).columns["values"], strict=True
        ):
            assert values == pytest.approx(expected_values, abs=1e-5)
        published = Path((await ranked.publish(weights_dir=str(tmp_path / "ranked"), version=1)).uri)
        other = Path(alone.publish(weights_dir=str(tmp_path / "w"), version=1).uri)
        for file in (MODEL_FILE, CRITIC_FILE):
            ours, theirs = load_file(published / file), load_file(other / file)
            assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5
        await ranked.close()

    try:
        asyncio.run(check())
    finally:
        processes.end()
