"""A trainer's state out of its process's memory and back through the state store, against a copy of it.

A learner of 135 million parameters in float32 that has made one step: weights and both moments of AdamW,
1.6 GB. Out, as a group's OFFLOAD does it: a draft on tmpfs is written tensor by tensor, digested while it is
written, and put; then the learner is closed. In, as a LOAD does it: a learner that has not made a step yet
gets the file, maps it and copies every tensor to where it keeps it. The other side clones every tensor of the
state. What either allocates is new to the process; a copy into memory that is there already takes a fraction
of that (`swap_warm_copy_s`). One thread of torch, one of the digest. The sides take turns after one warm
round; the ratio is the median over the rounds. `swap_zero1_ratio` is the same for DeepSpeed ZeRO-1 on one
rank. `digest_ratio` is how many times as fast the digest is as the standard library's blake2b, one thread
each.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.state.drafts import Surroundings
from megloom.compute.state.keys import Key
from megloom.compute.state.store import StateStore
from megloom.compute.state.tiers import Tier, TierPlan
from megloom.compute.store.offload import ThreadOffload
from megloom.compute.trainers.learners import Learner, make_learner
from megloom.compute.trainers.protocol import TrainerPlan
from megloom.compute.trainers.snapshot import read_state, write_state
from megloom.compute.workload import Optimizer

LAYERS, HIDDEN, INTERMEDIATE, VOCAB = 30, 576, 1536, 49152
STATE_BYTES = 3 * 4 * 134_515_008
NUM_ROUNDS = 5
DIGEST_BYTES = 256 << 20
TARGET_RATIO, TARGET_MEMORY_GIB = 3.0, 8.0
SHM = Path("/dev/shm")
ZERO1 = {"backend": "deepspeed", "zero_stage": 1}

MMAP_THRESHOLD = -3  # of glibc's mallopt

Rounds = list[tuple[float, float, float, float]]


def model_of_135m() -> Any:
    """134.5 million random parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def new_learner(model: Any, knobs: dict[str, Any]) -> Learner:
    """A learner of a copy of the model that has not made a step: there are no moments yet."""
    optimizer = Optimizer(learning_rate=1e-4)
    plan = TrainerPlan(
        policy="solver",
        model={},
        algorithm=Grpo().model_dump(),
        optimizer=optimizer.model_dump(),
        warm_optimizer=None,
        seed=0,
        trainer=knobs,
    )
    return make_learner(plan, deepcopy(model), optimizer=optimizer, warm_optimizer=None)


def make_step(learner: Learner) -> None:
    """One step along the sum of all weights, after which the moments are there."""
    learner.num_rounds(1)
    learner.backward(sum((value.sum() for value in learner.model.parameters()), torch.zeros(())))
    learner.add_gradients("first", 1)
    learner.drop_gradients()
    learner.step(1.0, warm=False)


def swap_figures() -> dict[str, dict[str, Any]]:
    """swap_ratio, its two halves as shares of the same copy, and the peak memory of the process."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the system
    rounds = rounds_of({})
    memory_gib = _peak_memory_gib()
    return {
        "swap_ratio": _figure(_ratio(rounds), "x", TARGET_RATIO),
        "swap_out_ratio": _figure(statistics.median(out / copy for copy, _, out, _ in rounds), "x", None),
        "swap_in_ratio": _figure(statistics.median(back / copy for copy, _, _, back in rounds), "x", None),
        "swap_copy_s": _figure(statistics.median(copy for copy, *_ in rounds), "s", None),
        "swap_warm_copy_s": _figure(statistics.median(warm for _, warm, *_ in rounds), "s", None),
        "swap_memory": _figure(memory_gib, "GiB", TARGET_MEMORY_GIB),
        "swap_zero1_ratio": _figure(_ratio(rounds_of(ZERO1)), "x", None),
        **_digest_figures(),
    }


def rounds_of(knobs: dict[str, Any]) -> Rounds:
    """Seconds of (copy, copy into the same memory again, out, in) per round."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        return asyncio.run(_rounds(Path(folder), knobs))


async def _rounds(folder: Path, knobs: dict[str, Any]) -> Rounds:
    rounds = []
    model = model_of_135m()
    learner = new_learner(model, knobs)
    make_step(learner)
    tier = TierPlan(tier=Tier.TMPFS, root=str(folder / "tmpfs"), budget_bytes=4 * STATE_BYTES)
    with ThreadOffload("rows") as offload, ThreadOffload("bulk") as bulk:
        around = Surroundings(offload=offload, bulk=bulk)
        async with StateStore.open("node", [tier], folder / "index.sqlite", around) as store:
            for number in range(NUM_ROUNDS + 1):
                _, state = learner.state("solver")
                began = time.perf_counter()
                copies = {name: tensor.clone() for name, tensor in state.items()}
                copy_s = time.perf_counter() - began
                began = time.perf_counter()
                for name, tensor in state.items():
                    copies[name].copy_(tensor)
                warm_s = time.perf_counter() - began
                key = Key(run="bench", policy="solver", kind="trainer", version=number)
                began = time.perf_counter()
                draft = await store.draft(STATE_BYTES)
                await store.put(key, draft, digest=write_state(draft.path, *learner.state("solver")))
                out_s = time.perf_counter() - began
                learner.close()
                del learner, state
                gc.collect()  # an engine's parts hold on to each other
                learner = new_learner(model, knobs)
                began = time.perf_counter()
                learner.restore(*read_state(await store.get(key)))
                in_s = time.perf_counter() - began
                _, back = learner.state("solver")
                assert all(torch.equal(back[name], copy) for name, copy in copies.items())
                del copies, back
                await store.delete(key)
                rounds.append((copy_s, warm_s, out_s, in_s))
    learner.close()
    return rounds[1:]  # the first one warms up


def _ratio(rounds: Rounds) -> float:
    return statistics.median((out + back) / copy for copy, _, out, back in rounds)


def _digest_figures() -> dict[str, dict[str, Any]]:
    data = os.urandom(DIGEST_BYTES)
    seconds: dict[Any, list[float]] = {blake3: [], blake2b: []}
    for _ in range(NUM_ROUNDS):
        for digest, found in seconds.items():
            began = time.perf_counter()
            digest(data).digest()
            found.append(time.perf_counter() - began)
    ours, theirs = (statistics.median(found) for found in seconds.values())
    return {
        "digest_ratio": _figure(theirs / ours, "x", None),
        "digest_rate": _figure(DIGEST_BYTES / ours / 1e9, "GB/s", None),
    }


def _peak_memory_gib() -> float:
    """The most that this process held; the state's file in memory is added to it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak_kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return peak_kib / 2**20


def _figure(value: float, unit: str, target: float | None) -> dict[str, Any]:
    figure: dict[str, Any] = {"value": round(value, 3), "unit": unit}
    return figure if target is None else figure | {"target": target, "ok": value <= target}


if __name__ == "__main__":
    print(json.dumps(swap_figures(), indent=2))
