"""A trainer's state out of memory and back through the state store, against a copy of it in memory.

The state of a 135M-parameter model in float32: weights and both moments of AdamW, random numbers in the
tensors of its layers, 1.6 GB. Out: a draft on tmpfs is written tensor by tensor, digested while it is
written, and put. In: `get`, the file mapped, every tensor copied to memory of its own. The other side clones
every tensor, so both end with the whole state in memory of its own. One thread of torch, two of the digest.
The sides take turns after one warm round; the ratio is the median over the rounds.

`swap_zero1_ratio`, for comparison: a DeepSpeed ZeRO-1 learner of that size on one rank, its state gathered
and written to tmpfs as the trainer's `save` does it, read and restored into the learner, over the same copy.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.state.drafts import Surroundings
from megloom.compute.state.keys import Key
from megloom.compute.state.store import StateStore
from megloom.compute.state.tiers import Tier, TierPlan
from megloom.compute.store.offload import ThreadOffload
from megloom.compute.trainers.device_copy import restored, save_tensors
from megloom.compute.trainers.learners import Learner, make_learner
from megloom.compute.trainers.protocol import TrainerPlan
from megloom.compute.trainers.snapshot import read_state, write_state
from megloom.compute.workload import Optimizer

LAYERS, HIDDEN, KEY_VALUE, INTERMEDIATE, VOCAB = 30, 576, 192, 1536, 49152
MOMENTS = ("model", "exp_avg", "exp_avg_sq")
NUM_ROUNDS = 5
TARGET_RATIO, TARGET_MEMORY_GIB = 3.0, 8.0
SHM = Path("/dev/shm")


def state_of_135m() -> dict[str, Tensor]:
    """134.5 million parameters and their moments, 1.6 GB."""
    shapes = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.q": (HIDDEN, HIDDEN),
            f"{layer}.k": (KEY_VALUE, HIDDEN),
            f"{layer}.v": (KEY_VALUE, HIDDEN),
            f"{layer}.o": (HIDDEN, HIDDEN),
            f"{layer}.gate": (INTERMEDIATE, HIDDEN),
            f"{layer}.up": (INTERMEDIATE, HIDDEN),
            f"{layer}.down": (HIDDEN, INTERMEDIATE),
            f"{layer}.norm1": (HIDDEN,),
            f"{layer}.norm2": (HIDDEN,),
        }
    return {f"{kind}.{name}": torch.rand(shape) for kind in MOMENTS for name, shape in shapes.items()}


def swap_figures() -> dict[str, dict[str, Any]]:
    """swap_ratio, its two halves as shares of the same copy, and the peak memory of the process."""
    torch.set_num_threads(1)
    root = SHM if SHM.is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        state = state_of_135m()
        rounds = asyncio.run(_rounds(Path(folder), state))
        memory_gib = _peak_memory_gib()
        del state
        zero1 = _zero1_ratio(Path(folder), statistics.median(copy for copy, _, _ in rounds))
    ratio = statistics.median((out + back) / copy for copy, out, back in rounds)
    return {
        "swap_ratio": _figure(ratio, "x", TARGET_RATIO),
        "swap_out_ratio": _figure(statistics.median(out / copy for copy, out, _ in rounds), "x", None),
        "swap_in_ratio": _figure(statistics.median(back / copy for copy, _, back in rounds), "x", None),
        "swap_copy_s": _figure(statistics.median(copy for copy, _, _ in rounds), "s", None),
        "swap_zero1_ratio": _figure(zero1, "x", None),
        "swap_memory": _figure(memory_gib, "GiB", TARGET_MEMORY_GIB),
    }


async def _rounds(folder: Path, state: dict[str, Tensor]) -> list[tuple[float, float, float]]:
    """Seconds of (copy, out, in) per round."""
    rounds = []
    size_bytes = sum(tensor.nbytes for tensor in state.values())
    tier = TierPlan(tier=Tier.TMPFS, root=str(folder / "tmpfs"), budget_bytes=4 * size_bytes)
    with ThreadOffload("rows") as offload, ThreadOffload("bulk") as bulk:
        around = Surroundings(offload=offload, bulk=bulk)
        async with StateStore.open("node", [tier], folder / "index.sqlite", around) as store:
            for number in range(NUM_ROUNDS + 1):
                began = time.perf_counter()
                copies = {name: tensor.clone() for name, tensor in state.items()}
                copy_s = time.perf_counter() - began
                del copies
                key = Key(run="bench", policy="solver", kind="trainer", version=number)
                began = time.perf_counter()
                draft = await store.draft(size_bytes)
                written = save_tensors(draft.path, state, {"step": str(number)})
                await store.put(key, draft, digest=written.digest)
                out_s = time.perf_counter() - began
                began = time.perf_counter()
                back = restored(await store.get(key))
                in_s = time.perf_counter() - began
                assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
                del back
                await store.delete(key)
                rounds.append((copy_s, out_s, in_s))
    return rounds[1:]  # the first one warms up


def _zero1_ratio(folder: Path, copy_s: float) -> float:
    """The median round of state, write, read and restore over `copy_s`; the first one warms up."""
    learner, path = zero1_learner(), folder / "zero1"
    seconds = []
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        write_state(path, *learner.state("solver"))
        learner.restore(*read_state(path))
        seconds.append(time.perf_counter() - began)
        path.unlink()
    learner.close()
    return statistics.median(seconds[1:]) / copy_s


def zero1_learner() -> Learner:
    """A learner of 134.5 million parameters that has made one step, so that its moments are there."""
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
    optimizer = Optimizer(learning_rate=1e-4)
    plan = TrainerPlan(
        policy="solver",
        model={},
        algorithm=Grpo().model_dump(),
        optimizer=optimizer.model_dump(),
        warm_optimizer=None,
        seed=0,
        trainer={"backend": "deepspeed", "zero_stage": 1},
    )
    learner = make_learner(plan, LlamaForCausalLM(config), optimizer=optimizer, warm_optimizer=None)
    learner.num_rounds(1)
    learner.backward(sum((value.sum() for value in learner.model.parameters()), torch.zeros(())))
    learner.add_gradients("first", 1)
    learner.drop_gradients()
    learner.step(1.0, warm=False)
    return learner


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
