"""A trainer's state in one file: safetensors, with the plain facts as JSON in its header. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megloom.compute.state.durable import replace_file
from megloom.compute.trainers.protocol import TrainerError

SCHEMA_VERSION = 1
_HEADER_KEY = "megloom_trainer_state"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is not a tensor. `micro_batch_ids` are those whose gradient sums the file holds.

    `num_warm_steps` is None once the warm optimizer is dropped, or if there was none.
    """

    policy: str
    num_steps: int
    num_warm_steps: int | None
    micro_batch_ids: tuple[str, ...]
    num_trainable: int
    schema_version: int = SCHEMA_VERSION


def write_state(path: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Writes the file, whole or not at all; an older one is replaced."""
    header = {_HEADER_KEY: json.dumps(asdict(facts))}
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, lambda temporary: save_file(whole, temporary, metadata=header))


def read_state(path: Path) -> tuple[Facts, dict[str, Tensor]]:
    """The inverse of `write_state`.

    Raises: FileNotFoundError if the file is missing; TrainerError if it is not a whole trainer state.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no trainer state at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()[_HEADER_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        facts = Facts(**{**values, "micro_batch_ids": tuple(values["micro_batch_ids"])})
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise TrainerError(f"trainer state {path} is unreadable: {error}") from error
    if facts.schema_version > SCHEMA_VERSION:
        raise TrainerError(
            f"trainer state {path}: schema_version {facts.schema_version}, newest known {SCHEMA_VERSION}"
        )
    return facts, tensors
