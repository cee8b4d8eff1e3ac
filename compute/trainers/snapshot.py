"""A trainer's state, or a replica's gradient sums, in one file: safetensors, with the plain facts as JSON in
its header. No pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megloom.compute.state.durable import replace_file
from megloom.compute.trainers.device_copy import save_tensors
from megloom.compute.trainers.protocol import TrainerError

SCHEMA_VERSION = 3  # 2 added `trainer_version`, 3 `adapter_base`
_STATE, _SUMS = "megloom_trainer_state", "megloom_gradient_sums"
_TITLES = {_STATE: "trainer state", _SUMS: "gradient sums"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is not a tensor. `micro_batch_ids` are those whose gradient sums the file holds.

    `num_warm_steps` is None once the warm optimizer is dropped, or if there was none. `trainer_version` is
    the version that the weights stem from plus the updates since, which is what lag is measured against.
    `adapter_base` is the folder name of the version that LoRA's adapter lies on, None without or if unknown.
    """

    policy: str
    num_steps: int
    num_warm_steps: int | None
    micro_batch_ids: tuple[str, ...]
    num_trainable: int
    trainer_version: int = 0
    adapter_base: str | None = None
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class SumsFacts:
    """What gradient sums were taken of: micro-batches under the weights of `trainer_version`."""

    policy: str
    trainer_version: int
    micro_batch_ids: tuple[str, ...]
    num_trainable: int
    schema_version: int = SCHEMA_VERSION


_Kind = TypeVar("_Kind", Facts, SumsFacts)


def write_state(path: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> str:
    """Writes the file, whole or not at all; an older one is replaced. Returns its `digests.file_digest`."""
    return _write(path, _STATE, asdict(facts), tensors)


def read_state(path: Path) -> tuple[Facts, dict[str, Tensor]]:
    """The inverse of `write_state`. The tensors are mapped, not read yet: copy what is kept.

    Raises: FileNotFoundError if the file is missing; TrainerError if it is not a whole trainer state.
    """
    return _read(path, _STATE, Facts)


def write_sums(path: Path, facts: SumsFacts, sums: Mapping[str, Tensor]) -> None:
    """Writes the file, whole or not at all; an older one is replaced."""
    _write(path, _SUMS, asdict(facts), sums)


def read_sums(path: Path) -> tuple[SumsFacts, dict[str, Tensor]]:
    """The inverse of `write_sums`.

    Raises: FileNotFoundError if the file is missing; TrainerError if it is not a whole file of sums.
    """
    return _read(path, _SUMS, SumsFacts)


def _write(path: Path, key: str, facts: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    metadata = {key: json.dumps(facts)}
    return replace_file(path, lambda temporary: save_tensors(temporary, tensors, metadata)).digest


def _read(path: Path, key: str, kind: type[_Kind]) -> tuple[_Kind, dict[str, Tensor]]:
    title = _TITLES[key]
    if not path.is_file():
        raise FileNotFoundError(f"no {title} at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()[key])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        facts = kind(**{**values, "micro_batch_ids": tuple(values["micro_batch_ids"])})
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise TrainerError(f"{title} {path} is unreadable: {error}") from error
    if facts.schema_version > SCHEMA_VERSION:
        raise TrainerError(
            f"{title} {path}: schema_version {facts.schema_version}, newest known {SCHEMA_VERSION}"
        )
    return facts, tensors
