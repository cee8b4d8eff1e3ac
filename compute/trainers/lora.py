"""Low-rank adapters beside frozen weights: put in with peft, published merged and as peft's own files.

Engines load whole weights, so a version's model.safetensors holds W + (alpha / rank) · B·A; the adapter lies
beside it as adapter/adapter_model.safetensors and adapter/adapter_config.json, which
`peft.PeftModel.from_pretrained` loads on top of the version that its configuration names as the base: the one
that the adapter began on. Not in the version's own folder: transformers would find it there and add it a
second time. Source: LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megloom.compute.workload import Lora

ADAPTER_DIR, ADAPTER_FILE = "adapter", "adapter_model.safetensors"
_ADAPTER = "default"
_BASE, _A, _B = ".base_layer.", f".lora_A.{_ADAPTER}.", f".lora_B.{_ADAPTER}."
_PEFT_PREFIX = "base_model.model."  # of every name in an adapter's file
Read = Callable[[str], Tensor]


def add_lora(model: Any, knobs: Lora) -> None:
    """Freezes the model and puts trained adapters beside the linear layers that `knobs.targets` name.

    B starts at zero, so the outputs stay as they were; A is drawn from torch's generator.
    Raises: ValueError naming the target if it is no layer of the model, or one whose update no version could
        hold; ModuleNotFoundError without peft.
    """
    _check_targets(model, knobs.targets)
    try:
        from peft import inject_adapter_in_model  # seconds to import, and only adapters need it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: lora needs the extra 'lora'") from error
    inject_adapter_in_model(_config(knobs), model, adapter_name=_ADAPTER)
    model.megloom_lora = knobs


def _check_targets(model: Any, targets: Sequence[str]) -> None:
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in targets]
    missing = sorted(set(targets) - {name.rpartition(".")[2] for name, _ in found})
    if missing or not targets:
        raise ValueError(f"lora targets {', '.join(missing) or 'none'}: no such layers in the model")
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module in found:
        if not isinstance(module, nn.Linear):
            raise ValueError(f"lora target {name} is a {type(module).__name__}, expected a linear layer")
        others = [other for other in owners[id(module.weight)] if other != f"{name}.weight"]
        if others:
            # A version holds the shared weight once, so that an update of one use would be lost.
            raise ValueError(f"lora target {name} shares its weight with {', '.join(others)}: leave it out")


def merged_weights(model: Any, read: Read) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of the model as it was before adapters came, their updates added.

    `read` returns a parameter's full tensor by its name in the model as it is. Parameters come in the order
    of the model, so that every rank of a sharded one reads them in the same order.
    """
    knobs: Lora | None = getattr(model, "megloom_lora", None)
    for name in [name for name, _ in model.named_parameters()]:
        if _A in name or _B in name:
            continue
        value = read(name)
        if _BASE in name and name.endswith(".weight") and knobs is not None:
            before, after = read(name.replace(_BASE, _A)), read(name.replace(_BASE, _B))
            value = value + after @ before * (knobs.alpha / knobs.rank)
        yield name.replace(_BASE, "."), value


def adapter_weights(model: Any, read: Read) -> dict[str, Tensor]:
    """The adapters' tensors by peft's names; empty without adapters."""
    names = [name for name, _ in model.named_parameters() if _A in name or _B in name]
    return {_PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): read(name) for name in names}


def write_adapter(model: Any, tensors: Mapping[str, Tensor], directory: Path, *, base: Path | None) -> None:
    """Writes `adapter_weights` and their configuration into a version's folder, in peft's layout.

    `base` is the version that the adapter lies on, None if that is not known.
    """
    directory = directory / ADAPTER_DIR
    directory.mkdir(exist_ok=True)
    whole = {name: value.contiguous().to(torch.float32) for name, value in tensors.items()}
    save_file(whole, directory / ADAPTER_FILE, metadata={"format": "pt"})
    _config(model.megloom_lora, base).save_pretrained(directory)


def _config(knobs: Lora, base: Path | None = None) -> Any:
    from peft import LoraConfig

    arguments: dict[str, Any] = {  # peft's annotation of lora_alpha is narrower than what it takes
        "r": knobs.rank,
        "lora_alpha": knobs.alpha,
        "target_modules": sorted(knobs.targets),
        "lora_dropout": 0.0,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
    }
    return LoraConfig(**arguments)
