"""How many trainer cells a session has, and which knobs cannot work together."""

from __future__ import annotations

import pytest

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.groups import trainer_cells
from megloom.compute.workload import Trainer

PLAIN, HELPED = Trainer(), Trainer(replicas=3)
SHARDED = Trainer(backend="deepspeed", zero_stage=2)


def test_by_default_every_replica_has_a_cell() -> None:
    assert len(trainer_cells(None, {"a": PLAIN, "b": HELPED})) == 4
    assert len(trainer_cells(None, {})) == 1  # version 0 of untrained policies is made somewhere
    assert [cell.name for cell in trainer_cells(2, {"a": PLAIN})] == ["trainers/0", "trainers/1"]


def test_policies_that_keep_their_cell_must_leave_one_for_the_others() -> None:
    with pytest.raises(ValueError, match="cells.trainers 2, expected at least 3: a, b keep theirs in mid-"):
        trainer_cells(2, {"a": SHARDED, "b": SHARDED, "c": PLAIN, "d": PLAIN})
    with pytest.raises(ValueError, match="cells.trainers 1, expected at least 2: a, b"):
        trainer_cells(1, {"a": SHARDED, "b": SHARDED})
    assert len(trainer_cells(3, {"a": SHARDED, "b": SHARDED, "c": PLAIN, "d": PLAIN})) == 3


def test_a_run_may_go_on_with_other_trainer_cells() -> None:
    def hash_of(**cells: object) -> str:
        values = {"workload": "a:b", "run": "r", "steps": 1, "cells": cells}
        return SessionConfig.parse(values).config_hash()

    assert hash_of() == hash_of(trainers=1, trainer_idle_s=3.0) != hash_of(threads=2)
