"""The knobs of a training session: pure pydantic, checked in milliseconds, nothing heavy imported."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, field_validator

from megloom.compute.closed import Closed

Mode = Literal["frozen", "sync"]
# Of cells: where things are shapes no result.
_PLACES = {"trainers", "trainer_idle_s", "engine_folders", "engine_python"}
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_WORKLOAD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Cells(Closed):
    """How many processes play each part on this machine."""

    engines_per_policy: int = Field(default=1, ge=1)
    engine_slots: int = Field(default=256, ge=1, description="concurrent sequences of one engine")
    workload_workers: int = Field(default=1, ge=1)
    trainers: int | None = Field(
        default=None, ge=1, description="places for trainers (default: one for each replica of each policy)"
    )
    trainer_idle_s: float | None = Field(
        default=None, gt=0, description="trainers idle for so long leave (default: when a place is wanted)"
    )
    gateways: int = Field(
        default=1, ge=1, description="gateway processes, if the workload needs any; an episode stays with one"
    )
    engine_folders: tuple[str, ...] = Field(
        default=(), description="folders that engines load new versions from, in turn (default: the store)"
    )
    threads: int = Field(default=1, ge=1, description="torch threads of each engine and trainer process")
    device: str = Field(default="cpu", description="device of engines and trainers")
    engine: Literal["local", "sglang"] = Field(
        default="local", description="who samples: this repository's engine, or real SGLang"
    )
    engine_python: str | None = Field(
        default=None, description="interpreter that has sglang (default: the service's own)"
    )

    @field_validator("engine")
    @classmethod
    def _sglang_has_a_whole_device(cls, value: str, info: ValidationInfo) -> str:
        device = info.data.get("device", "cpu")
        if value == "sglang" and device not in ("cpu", "cuda"):
            raise ValueError(f"sglang runs on device cpu or cuda, not {device}")
        return value


class Storage(Closed):
    """Where sealed steps go, and how long their tokens stay. Weights and journals are in the home."""

    root: str | None = Field(
        default=None, description="folder or fsspec URL such as s3://bucket/runs (default: the home's store)"
    )
    keep_tokens_of_versions: int | None = Field(
        default=None, ge=1, description="drop token segments older than so many versions (default: keep all)"
    )
    keep_states: int = Field(
        default=1, ge=1, description="trainer states kept of each policy; those of pinned versions stay too"
    )


class TrainingOverrides(Closed):
    """Values that replace the workload's own `Training`; None keeps the workload's.

    "all" paths of an episode is the workload's own None.
    """

    tasks_per_step: int | None = Field(default=None, ge=1)
    group_size: int | None = Field(default=None, ge=2)
    micro_batch_groups: int | None = Field(default=None, ge=1)
    paths_per_episode: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    warm_examples: int | None = Field(default=None, ge=0)
    warm_batch: int | None = Field(default=None, ge=1)
    eval_every: int | None = Field(default=None, ge=0)
    eval_small: int | None = Field(default=None, ge=1)
    eval_tasks: int | None = Field(default=None, ge=1, description="held-out tasks in a full evaluation")
    eval_draws: int | None = Field(default=None, ge=1)
    episode_timeout_s: float | None = Field(default=None, gt=0)
    call_timeout_s: float | None = Field(default=None, gt=0)
    field_timeout_s: float | None = Field(default=None, gt=0)
    reward_retries: int | None = Field(default=None, ge=0)

    @field_validator("paths_per_episode", mode="wrap")
    @classmethod
    def _paths_are_a_number_or_all(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """One line in place of one for each member of the union."""
        try:
            return check(value)
        except ValidationError:
            raise ValueError('expected a whole number of at least 1, or "all"') from None

    def replacing(self) -> dict[str, Any]:
        """The fields of `Training` that these values replace."""
        given = self.model_dump(exclude_none=True, exclude={"eval_tasks"})
        return {name: None if value == "all" else value for name, value in given.items()}


class SessionConfig(Closed):
    """One training session: `steps` counts the run's training steps in total, also after a resume.

    `mode`: "frozen" takes gradients while other episodes still run; "sync" takes them when all have ended.
    Both update every policy once, at the end of the step, and give the same numbers.
    `duration_s`, if set, ends the run with the first step that finishes after it.
    """

    workload: str = Field(description="package.module:attribute of the Workload")
    run: str = Field(description="name of the run, unique in this home")
    steps: int = Field(ge=0)
    seed: int = Field(default=0, ge=0)
    mode: Mode = "frozen"
    imitation_only: bool = Field(default=False, description="every step repeats the demonstration step")
    duration_s: float | None = Field(default=None, gt=0)
    lease_s: float = Field(
        default=600.0, gt=0, description="the session pauses when no client asks for so long"
    )
    import_paths: tuple[str, ...] = Field(default=(), description="folders to import the workload from")
    training: TrainingOverrides = TrainingOverrides()
    cells: Cells = Cells()
    storage: Storage = Storage()

    @field_validator("run")
    @classmethod
    def _run_is_a_name(cls, value: str) -> str:
        if not _RUN_NAME.fullmatch(value):
            raise ValueError("a run name is 1 to 64 letters, digits, '_', '.', '-', and starts with no sign")
        return value

    @field_validator("workload")
    @classmethod
    def _workload_is_a_path(cls, value: str) -> str:
        if not _WORKLOAD.fullmatch(value):
            raise ValueError("expected package.module:attribute")
        return value

    def config_hash(self) -> str:
        """Hash of all that shapes the result; name, length, lease, storage and trainer places do not."""
        aside = dict.fromkeys(("run", "steps", "lease_s", "duration_s", "import_paths", "storage"), True)
        shaping = self.model_dump(exclude={**aside, "cells": _PLACES})
        return hashlib.blake2b(json.dumps(shaping, sort_keys=True).encode(), digest_size=8).hexdigest()


def set_path(values: dict[str, Any], assignment: str) -> None:
    """Puts `a.b=value` into nested `values`; the value is JSON where it parses as JSON, else text.

    Raises: ValueError if there is no '='.
    """
    path, sign, text = assignment.partition("=")
    if not sign or not path:
        raise ValueError(f"expected key=value, got {assignment!r}")
    *parents, leaf = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    try:
        values[leaf] = json.loads(text)
    except json.JSONDecodeError:
        values[leaf] = text
