"""The replica's contract: sums that no cut can change, steps that fail whole, state that moves to the bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megloom.compute.algorithms.base import Cispo, Clip, Correction, Gspo, Kl, PolicyGradient, Sapo
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.state.weights import MODEL_FILE, put_version, read_manifest
from megloom.compute.trainers.model import copy_companions, load_model
from megloom.compute.trainers.protocol import TrainerError, TrainingRow
from megloom.compute.trainers.replica import Replica
from megloom.compute.workload import Optimizer

from .builders import (
    batch,
    critic_columns,
    distance,
    gradient_sums,
    plan,
    ragged_rows,
    replica,
    row,
    same_bits,
    state_tensors,
)

ROWS = ragged_rows(48)


def take_in_parts(trainer: Replica, rows: Sequence[TrainingRow], num_parts: int) -> None:
    for part in range(num_parts):
        trainer.forward_backward(batch(rows[part::num_parts], name=f"part-{part}"))


@pytest.mark.parametrize("num_parts", [2, 3, 8])
@pytest.mark.parametrize("shuffled", [False, True])
def test_no_cut_and_no_order_changes_the_gradient(tmp_path: Path, num_parts: int, shuffled: bool) -> None:
    whole, parts = replica(tmp_path / "w"), replica(tmp_path / "w", trainer={"budget_tokens": 100})
    report = whole.forward_backward(batch(ROWS))
    rows = random.Random(num_parts).sample(ROWS, len(ROWS)) if shuffled else ROWS
    take_in_parts(parts, rows, num_parts)
    assert distance(gradient_sums(whole, tmp_path), gradient_sums(parts, tmp_path)) < 1e-6
    scale = 1.0 / report.num_trainable
    one, other = whole.optim_step(scale=scale), parts.optim_step(scale=scale)
    assert one.num_trainable == other.num_trainable == sum(int(r.loss_mask.sum()) for r in ROWS)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert other.micro_batch_ids == tuple(f"part-{i}" for i in range(num_parts))


LOSSES: dict[str, PolicyGradient] = {
    "gspo, kl, entropy, token-tis": Grpo(
        surrogate=Gspo(form="token", token_cap=5),
        kl=Kl(coefficient=0.1),
        entropy=0.01,
        correction=Correction(name="token-tis"),
    ),
    "gspo, sequence-mask": Grpo(
        surrogate=Gspo(), correction=Correction(name="sequence-mask", low=0.1, high=10)
    ),
    "cispo, sequence-tis": Grpo(surrogate=Cispo(), correction=Correction(name="sequence-tis")),
    "sapo, icepop": Grpo(surrogate=Sapo(), correction=Correction(name="icepop")),
    "dual clip, decoupled": Grpo(surrogate=Clip(dual_clip=3), correction=Correction(name="decoupled")),
    "critic": Ppo(kl=Kl(coefficient=0.1, estimator="k1")),
}


def branches(count: int) -> list[TrainingRow]:
    """Rows of which every three share a prompt."""
    rows = []
    for number, one in enumerate(ragged_rows(count)):
        prompt = row(number // 3, num_prompt=12, num_sampled=1).token_ids[:12]
        ids = np.concatenate([prompt, one.token_ids]).astype(np.int32)
        zeros = np.zeros(12, np.float32)
        longer = replace(
            one,
            token_ids=ids,
            loss_mask=np.concatenate([zeros, one.loss_mask]).astype(np.uint8),
            logprobs=np.concatenate([zeros, one.logprobs]),
            episode_id=f"episode-{number // 3}",
        )
        rows.append(longer)
    return rows


def sampled_by(trainer: Replica, rows: list[TrainingRow]) -> list[TrainingRow]:
    """The rows as if slightly other weights than the trainer's had sampled them, with all columns."""
    rng = np.random.default_rng(5)
    columns = trainer.forward(batch(rows), ["proximal_logprobs"]).columns["proximal_logprobs"]
    sampled = []
    for number, (one, own) in enumerate(zip(rows, columns, strict=True)):
        noise, other_noise = rng.normal(0, 0.2, (2, len(own))).astype(np.float32)
        columns_of_row = {**critic_columns(one, number), "reference_logprobs": own + other_noise}
        sampled.append(replace(one, logprobs=own + noise, columns=columns_of_row))
    return sampled


@pytest.mark.parametrize("name", LOSSES)
def test_no_cut_and_no_order_changes_any_losss_gradient(tmp_path: Path, name: str) -> None:
    knobs = {"algorithm": LOSSES[name].model_dump()}
    rows = sampled_by(replica(tmp_path / "w"), branches(24))
    reports, gradients = [], []
    for num_parts, budget in ((1, 4096), (2, 4096), (3, 64), (8, 1)):
        trainer = replica(tmp_path / "w", **knobs, trainer={"budget_tokens": budget})
        shuffled = random.Random(num_parts).sample(rows, len(rows)) if num_parts > 1 else rows
        parts = [batch(shuffled[part::num_parts], name=f"part-{part}") for part in range(num_parts)]
        reports.append([trainer.forward_backward(part) for part in parts])
        gradients.append(gradient_sums(trainer, tmp_path))
    # A sequence's weight is the exponential of a sum over its tokens: so many times a logprob's rounding.
    bound = 5e-6 if name.endswith("sequence-tis") else 1e-6
    for other in gradients[1:]:
        assert distance(gradients[0], other) < bound
    for kind in reports[0][0].sums.keys() - {"num_computed"}:
        totals = [math.fsum(report.sums[kind][0] for report in parts) for parts in reports]
        assert totals == pytest.approx([totals[0]] * 4, rel=1e-5, abs=1e-5), kind
    computed = [sum(report.sums["num_computed"][0] for report in parts) for parts in reports]
    assert computed[0] < computed[-1] <= sum(len(one.token_ids) for one in rows), "prefixes were shared"


def test_the_same_micro_batches_in_the_same_order_are_bit_equal(tmp_path: Path) -> None:
    trainers = [replica(tmp_path / "w") for _ in range(2)]
    for trainer in trainers:
        take_in_parts(trainer, ROWS, 5)
        trainer.optim_step(scale=0.01)
        take_in_parts(trainer, ROWS, 3)
        trainer.optim_step(scale=0.01)
    assert same_bits(*(state_tensors(trainer, tmp_path) for trainer in trainers))


def test_the_gradient_is_that_of_the_plain_formula(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    rows = [replace(one, weight=0.5 + i) for i, one in enumerate(ROWS[:6])]
    trainer.forward_backward(batch(rows))
    network = load_model(tmp_path / "w" / "v000000", torch.device("cpu")).double()
    total = torch.zeros((), dtype=torch.float64)
    for one in rows:
        ids = torch.tensor(one.token_ids[None].astype(np.int64))
        table = torch.log_softmax(network(input_ids=ids).logits[0], -1)
        for t in np.flatnonzero(one.loss_mask):
            ratio = torch.exp(table[t - 1, ids[0, t]] - float(one.logprobs[t]))
            surrogate = torch.minimum(ratio * one.advantage, ratio.clamp(0.8, 1.28) * one.advantage)
            total = total - one.weight * surrogate
    total.backward()
    expected = {f"sums/{name}": parameter.grad for name, parameter in network.named_parameters()}
    assert distance(gradient_sums(trainer, tmp_path), expected) < 1e-5


def test_a_report_holds_sums_and_exact_counts(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    silent = row(7, loss_mask=np.zeros(7, np.uint8))
    report = trainer.forward_backward(batch([row(1), silent, row(2)]))
    assert (report.num_rows, report.num_empty_rows) == (2, 1)
    assert (report.num_tokens, report.num_trainable) == (21, 6)
    parts = replica(tmp_path / "w")
    reports = [parts.forward_backward(batch([one], name=one.sample_id)) for one in (row(1), row(2))]
    assert report.loss_sum == pytest.approx(sum(r.loss_sum for r in reports), rel=1e-5)
    assert report.num_clipped == sum(r.num_clipped for r in reports)
    assert report.max_logprob_gap == pytest.approx(max(r.max_logprob_gap or 0.0 for r in reports), rel=1e-5)


def test_the_logprob_gap_is_zero_on_policy_at_any_temperature(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    network = load_model(tmp_path / "w" / "v000000", torch.device("cpu"))
    rows = []
    for seed, temperature in enumerate((0.7, 1.0, 1.5)):
        one = row(seed, temperature=temperature)
        ids = torch.tensor(one.token_ids[None].astype(np.int64))
        with torch.no_grad():
            table = torch.log_softmax(network(input_ids=ids).logits[0] / temperature, -1)
        logprobs = one.logprobs.copy()
        for t in np.flatnonzero(one.loss_mask):
            logprobs[t] = table[t - 1, ids[0, t]]
        rows.append(replace(one, logprobs=logprobs))
    report = trainer.forward_backward(batch(rows))
    assert report.max_logprob_gap is not None and report.max_logprob_gap < 1e-5
    assert report.num_clipped == 0


def test_a_nan_in_a_masked_slot_changes_nothing(tmp_path: Path) -> None:
    clean, dirty = replica(tmp_path / "w"), replica(tmp_path / "w")
    one = row(1)
    logprobs = np.where(one.loss_mask, one.logprobs, np.nan).astype(np.float32)
    silent = row(9, loss_mask=np.zeros(7, np.uint8), advantage=math.nan)
    first = clean.forward_backward(batch([one, row(2)]))
    second = dirty.forward_backward(batch([replace(one, logprobs=logprobs), row(2), silent]))
    assert same_bits(gradient_sums(clean, tmp_path), gradient_sums(dirty, tmp_path))
    assert second.loss_sum == first.loss_sum


def test_a_nan_that_would_be_trained_on_stops_by_name_and_leaves_no_trace(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w", trainer={"budget_tokens": 8})  # one row a pass: the bad one comes last
    trainer.forward_backward(batch([row(1)], name="good"))
    before = gradient_sums(trainer, tmp_path)
    bad = row(5, num_prompt=30, advantage=-3e38, weight=3e38)  # finite each, not their product
    with pytest.raises(TrainerError, match=r"policy=solver forward_backward broken: sample sample-5"):
        trainer.forward_backward(batch([row(2), row(3), bad], name="broken"))
    assert same_bits(before, gradient_sums(trainer, tmp_path))
    assert trainer.optim_step(scale=1.0).micro_batch_ids == ("good",)


def test_a_gradient_that_is_not_finite_takes_no_step_and_is_forgotten(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    before = state_tensors(trainer, tmp_path)
    trainer.forward_backward(batch([row(1, weight=1e30)], loss="imitation"))
    with pytest.raises(TrainerError, match=r"policy=solver optim_step: gradient norm inf.*batch-0"):
        trainer.optim_step(scale=1e30)
    assert same_bits(before, state_tensors(trainer, tmp_path))
    trainer.forward_backward(batch([row(1)]))
    assert math.isfinite(trainer.optim_step(scale=1.0).grad_norm)


def test_a_batch_without_a_trainable_token_moves_nothing(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    trainer.forward_backward(batch([row(1)]))
    trainer.optim_step(scale=1.0)  # momentum is not zero now
    before = state_tensors(trainer, tmp_path)
    report = trainer.forward_backward(batch([row(2, loss_mask=np.zeros(7, np.uint8))]))
    assert (report.loss_sum, report.num_rows, report.max_logprob_gap) == (0.0, 0, None)
    update = trainer.optim_step(scale=1.0)
    assert (update.grad_norm, update.num_trainable) == (0.0, 0)
    assert same_bits(before, state_tensors(trainer, tmp_path))


def test_the_gradient_is_clipped_to_its_norm_and_reported_before(tmp_path: Path) -> None:
    def moved(clip: float) -> tuple[float, dict[str, Tensor]]:
        optimizer = Optimizer(learning_rate=1e-3, grad_clip=clip).model_dump()
        trainer = replica(tmp_path / "w", optimizer=optimizer)
        trainer.forward_backward(batch(ROWS))
        norm = trainer.optim_step(scale=1.0).grad_norm
        moments = {
            name: value
            for name, value in state_tensors(trainer, tmp_path).items()
            if name.startswith("optimizer/exp_avg/")
        }
        return norm, moments

    (norm, free), (same_norm, clipped) = moved(1e9), moved(0.25)
    assert same_norm == norm > 1.0
    scaled = {name: value * (0.25 / norm) for name, value in free.items()}
    assert distance(scaled, clipped) < 1e-5


def test_a_micro_batch_counts_once(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    trainer.forward_backward(batch([row(1)]))
    with pytest.raises(TrainerError, match="batch-0: its gradient is in the accumulation already"):
        trainer.forward_backward(batch([row(2)]))
    trainer.optim_step(scale=1.0)
    trainer.forward_backward(batch([row(1)]))


def test_misuse_is_refused_with_policy_and_verb(tmp_path: Path) -> None:
    empty = Replica(plan())
    with pytest.raises(TrainerError, match="policy=solver forward_backward batch-0: no weights are loaded"):
        empty.forward_backward(batch([row(1)]))
    trainer = replica(tmp_path / "w")
    with pytest.raises(TrainerError, match="policy=solver optim_step: no gradient"):
        trainer.optim_step(scale=1.0)
    with pytest.raises(TrainerError, match="loss 'hinge'"):
        trainer.forward_backward(batch([row(1)], loss="hinge"))
    trainer.forward_backward(batch([row(1)]))
    with pytest.raises(TrainerError, match="scale nan"):
        trainer.optim_step(scale=math.nan)
    trainer.optim_step(scale=1.0)
    trainer.forward_backward(batch([row(1)]))
    with pytest.raises(TrainerError, match="warm optimizer is dropped"):
        trainer.optim_step(scale=1.0, warm=True)
    with pytest.raises(TrainerError, match=r"are of \['solver', 'verifier'\]|are of \['solver'\]"):
        Replica(plan(policy="verifier")).load(weights_uri=str(tmp_path / "w" / "v000000"), state_path=None)
    with pytest.raises(ValueError, match="clip_lo"):
        Replica(plan(algorithm={"name": "grpo", "clip_lo": 0.1}))


def test_version_zero_is_made_once(tmp_path: Path) -> None:
    first = Replica(plan()).create(str(tmp_path))
    again = Replica(plan(seed=8)).create(str(tmp_path))
    assert first == again and first.version == 0 and read_manifest(Path(first.uri)).parent_version is None


def test_a_published_version_is_complete_loads_and_names_its_parent(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    trainer.forward_backward(batch(ROWS[:8]))
    trainer.optim_step(scale=0.1)
    published = trainer.publish(weights_dir=str(tmp_path / "w"), version=3)
    manifest = read_manifest(Path(published.uri))
    assert (manifest.digest, manifest.version, manifest.parent_version) == (published.digest, 3, 0)
    names = {path.name for path in Path(published.uri).iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", MODEL_FILE} <= names
    saved = load_file(Path(published.uri) / MODEL_FILE)
    held = state_tensors(trainer, tmp_path)
    assert all(torch.equal(saved[name], held[f"weights/{name}"]) for name in saved)
    assert (
        read_manifest(Path(trainer.publish(weights_dir=str(tmp_path / "w"), version=4).uri)).parent_version
        == 3
    )


def test_publishing_the_same_version_twice_is_no_change_and_other_weights_are_refused(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    first = trainer.publish(weights_dir=str(tmp_path / "w"), version=1)
    trainer.load(weights_uri=str(tmp_path / "w" / "v000000"), state_path=None)
    assert trainer.publish(weights_dir=str(tmp_path / "w"), version=1) == first
    trainer.load(weights_uri=str(tmp_path / "w" / "v000000"), state_path=None)
    trainer.forward_backward(batch([row(1)]))
    trainer.optim_step(scale=1.0)
    with pytest.raises(TrainerError, match="policy=solver publish version 1: .*refused to replace"):
        trainer.publish(weights_dir=str(tmp_path / "w"), version=1)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("num_before", [0, 2, 4])
def test_a_run_moved_in_mid_batch_is_bit_equal_to_one_that_stayed(
    tmp_path: Path, num_before: int, warm: bool
) -> None:
    knobs = Optimizer(learning_rate=3e-3, warmup_steps=3, total_steps=20).model_dump()
    parts = [batch(ROWS[part::4], name=f"part-{part}") for part in range(4)]

    def first_step(trainer: Replica) -> None:
        trainer.forward_backward(parts[0])
        trainer.optim_step(scale=0.01, warm=warm)

    stayed, moved = (replica(tmp_path / "w", warm_optimizer=knobs) for _ in range(2))
    first_step(stayed)
    first_step(moved)
    for part in parts[:num_before]:
        moved.forward_backward(part)
    moved.save(state_path=str(tmp_path / "state"))
    moved = Replica(plan(warm_optimizer=knobs, seed=1234))
    moved.load(weights_uri=str(tmp_path / "w" / "v000000"), state_path=str(tmp_path / "state"))
    for part in parts:
        stayed.forward_backward(part)
    for part in parts[num_before:]:
        moved.forward_backward(part)
    updates = [trainer.optim_step(scale=0.02, warm=warm) for trainer in (stayed, moved)]
    assert replace(updates[0], seconds=0.0) == replace(updates[1], seconds=0.0)
    assert same_bits(*(state_tensors(trainer, tmp_path) for trainer in (stayed, moved)))


def test_the_warm_optimizer_is_dropped_at_the_first_step_that_is_not_warm(tmp_path: Path) -> None:
    knobs = Optimizer(learning_rate=1e-2).model_dump()
    trainer = replica(tmp_path / "w", warm_optimizer=knobs)
    for name, warm in (("a", True), ("b", False)):
        trainer.forward_backward(batch([row(1)], name=name))
        trainer.optim_step(scale=1.0, warm=warm)
        has_moments = any(key.startswith("warm_optimizer/") for key in state_tensors(trainer, tmp_path))
        assert has_moments is warm
    trainer.forward_backward(batch([row(1)], name="c"))
    with pytest.raises(TrainerError, match="dropped"):
        trainer.optim_step(scale=1.0, warm=True)


def test_a_state_of_another_model_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    trainer.save(state_path=str(tmp_path / "state"))

    def wider(staging: Path) -> None:
        copy_companions(tmp_path / "w" / "v000000", staging)
        tensors = load_file(tmp_path / "w" / "v000000" / MODEL_FILE)
        save_file(tensors, staging / MODEL_FILE, metadata={"format": "pt"})

    put_version(tmp_path / "x", 0, policy="verifier", parent_version=None, write=wider)
    other = Replica(plan(policy="verifier"))
    with pytest.raises(TrainerError, match=r"are of \['solver', 'verifier'\]"):
        other.load(weights_uri=str(tmp_path / "x" / "v000000"), state_path=str(tmp_path / "state"))
    with pytest.raises(TrainerError, match="no weights are loaded"):
        other.forward_backward(batch([row(1)]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_agrees_with_the_cpu(tmp_path: Path) -> None:
    trainers = [replica(tmp_path / "w", device=device) for device in ("cpu", "cuda")]
    for trainer in trainers:
        trainer.forward_backward(batch(ROWS))
    assert distance(*(gradient_sums(trainer, tmp_path) for trainer in trainers)) < 1e-3
