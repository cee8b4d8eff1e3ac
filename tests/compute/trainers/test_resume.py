"""State out and in: at every step of a run, in mid-batch, with a critic, and on a disk that fills up."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megloom.compute.algorithms.base import Correction, Gspo, Kl
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.state.weights import is_complete, read_manifest
from megloom.compute.trainers.critic import CRITIC_FILE
from megloom.compute.trainers.protocol import MicroBatch, TrainerError, TrainingRow
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.snapshot import read_state
from megloom.compute.workload import Optimizer

from .builders import batch, plan, ragged_rows, replica, row, same_bits, state_tensors, with_critic_columns

NUM_STEPS = 9
OPTIMIZER = Optimizer(learning_rate=3e-3, warmup_steps=2, total_steps=12).model_dump()
GRPO = Grpo(
    surrogate=Gspo(form="token"),
    kl=Kl(coefficient=0.1),
    entropy=0.01,
    correction=Correction(name="token-tis"),
).model_dump()
PPO = Ppo(entropy=0.01).model_dump()
ALGORITHMS = {"grpo": GRPO, "ppo": PPO}


def recorded(algorithm: str) -> list[list[MicroBatch]]:
    """The micro-batches of every step, as a sealed step would give them."""
    rows = ragged_rows(NUM_STEPS * 6)
    rows = with_critic_columns(rows) if algorithm == "ppo" else [with_reference(one) for one in rows]
    return [
        [batch(rows[step * 6 + 3 * part :][:3], name=f"{step}-{part}") for part in range(2)]
        for step in range(NUM_STEPS)
    ]


def with_reference(one: TrainingRow) -> TrainingRow:
    return replace(one, columns={"reference_logprobs": one.logprobs + np.float32(0.1)})


def one_step(trainer: Replica, parts: Sequence[MicroBatch], folder: Path, version: int) -> None:
    for part in parts:
        trainer.forward_backward(part)
    trainer.optim_step(scale=0.02)
    trainer.publish(weights_dir=str(folder), version=version)


@pytest.mark.parametrize(
    ("algorithm", "in_mid_batch"),
    [
        ("grpo", False),
        ("ppo", True),
        pytest.param("grpo", True, marks=pytest.mark.slow),
        pytest.param("ppo", False, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_at_any_step_ends_with_the_same_bits(
    tmp_path: Path, algorithm: str, in_mid_batch: bool
) -> None:
    steps, knobs = recorded(algorithm), {"algorithm": ALGORITHMS[algorithm], "optimizer": OPTIMIZER}
    trainer, folder = replica(tmp_path / "w", **knobs), tmp_path / "w"
    for step, parts in enumerate(steps):
        if in_mid_batch:
            trainer.forward_backward(parts[0])
        trainer.save(state_path=str(tmp_path / f"state-{step}"))
        one_step(trainer, parts[in_mid_batch:], folder, step + 1)
    expected = state_tensors(trainer, tmp_path)
    last = read_manifest(folder / f"v{NUM_STEPS:06d}")
    for start in range(NUM_STEPS):
        resumed = Replica(plan(**knobs, seed=1000 + start))
        uri, state_path = folder / f"v{start:06d}", tmp_path / f"state-{start}"
        resumed.load(weights_uri=str(uri), state_path=str(state_path))
        for step in range(start, NUM_STEPS):
            done = in_mid_batch and step == start
            for part in steps[step][done:]:
                resumed.forward_backward(part)
            resumed.optim_step(scale=0.02)
        published = resumed.publish(weights_dir=str(tmp_path / f"from-{start}"), version=NUM_STEPS)
        assert published.digest == last.digest, f"resumed at step {start}"
        assert same_bits(state_tensors(resumed, tmp_path), expected), f"resumed at step {start}"


def test_a_critic_lies_beside_the_weights_and_comes_back_without_a_state(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    trainer = replica(folder, algorithm=PPO)
    one_step(trainer, recorded("ppo")[0], folder, 1)
    assert (folder / "v000001" / CRITIC_FILE).is_file()
    head = {name: value for name, value in state_tensors(trainer, tmp_path).items() if "value_head" in name}
    again = Replica(plan(algorithm=PPO))
    again.load(weights_uri=str(folder / "v000001"), state_path=None)
    loaded = state_tensors(again, tmp_path)
    names = [f"weights/value_head.{name}" for name in ("weight", "bias")]
    assert all(head[name].equal(loaded[name]) and head[name].any() for name in names)
    plain = Replica(plan())
    plain.load(weights_uri=str(folder / "v000001"), state_path=None)  # a policy without a critic ignores it
    assert not any("value_head" in name for name in state_tensors(plain, tmp_path))


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond the limit; a write that would gets what a full disk gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_leaves_the_old_files_valid(tmp_path: Path) -> None:
    folder, path = tmp_path / "w", tmp_path / "state"
    trainer = replica(folder)
    parts = recorded("grpo")[0]
    trainer.forward_backward(parts[0])
    trainer.save(state_path=str(path))
    old_facts, old = read_state(path)
    trainer.optim_step(scale=1.0)
    trainer.forward_backward(parts[1])
    verbs: list[tuple[str, Any]] = [
        ("save", lambda: trainer.save(state_path=str(path))),
        ("publish version 1", lambda: trainer.publish(weights_dir=str(folder), version=1)),
        ("export_gradients", lambda: trainer.export_gradients(path=str(tmp_path / "sums"))),
    ]
    for verb, call in verbs:
        with full_disk(20_000), pytest.raises(TrainerError, match=f"policy=solver {verb}"):
            call()
    facts, kept = read_state(path)
    assert facts == old_facts and same_bits(kept, old)
    assert not is_complete(folder / "v000001") and not (tmp_path / "sums").exists()
    assert read_manifest(folder / "v000000").version == 0
    assert not list(tmp_path.rglob("*.tmp")), "nothing half-written is left"
    trainer.save(state_path=str(path))
    assert read_state(path)[0].micro_batch_ids == ("0-1",), "the accumulation is still there"
    trainer.publish(weights_dir=str(folder), version=1)
    assert trainer.export_gradients(path=str(tmp_path / "sums")).micro_batch_ids == ("0-1",)


def test_an_interrupted_load_leaves_no_half_trainer(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    trainer.save(state_path=str(tmp_path / "state"))
    (tmp_path / "state").write_bytes((tmp_path / "state").read_bytes()[:-1])
    with pytest.raises(TrainerError, match="policy=solver load: trainer state .* is unreadable"):
        trainer.load(weights_uri=str(tmp_path / "w" / "v000000"), state_path=str(tmp_path / "state"))
    with pytest.raises(TrainerError, match="no weights are loaded"):
        trainer.forward_backward(batch([row(1)]))
