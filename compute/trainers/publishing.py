"""Versions in and out of a trainer: model, adapter, critic, and what goes along with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megloom.compute.state.staging import full_folder, usable_folder
from megloom.compute.state.weights import MODEL_FILE
from megloom.compute.trainers.critic import save_critic
from megloom.compute.trainers.learners import Learner
from megloom.compute.trainers.lora import write_adapter
from megloom.compute.trainers.model import copy_companions, load_model


def load_version(folder: Path, device: torch.device, *, or_anchor: bool = False) -> tuple[Any, str | None]:
    """The model of a version, in float32, and None; one that is kept as a delta is rebuilt first.

    `or_anchor` takes the newest intact anchor for a damaged version, and gives the damage: for a caller that
    has the version's own weights elsewhere.
    Raises: FileNotFoundError if the version is not there; WeightsError if it is corrupt.
    """
    if not or_anchor:
        return load_model(full_folder(folder), device), None
    found = usable_folder(folder)
    return load_model(found.folder, device), found.damage


def version_writer(
    learner: Learner, companions: Path, *, adapter_base: Path | None
) -> Callable[[Path], None]:
    """A function that fills a version's folder. Every rank must make one: it gathers what the ranks hold.

    `adapter_base` is the version that an adapter lies on.
    """
    adapter, extra = learner.adapter_weights(), learner.extra_weights()
    tensors: dict[str, Tensor] = {}
    for name, tensor in learner.weights():  # to the end on every rank; one of them keeps what it gets
        if learner.is_main:
            tensors[name] = tensor.contiguous()

    def write(folder: Path) -> None:
        copy_companions(companions, folder)
        save_file(tensors, folder / MODEL_FILE, metadata={"format": "pt"})
        if adapter:
            write_adapter(learner.model, adapter, folder, base=adapter_base)
        if extra:
            save_critic(extra, folder)

    return write
