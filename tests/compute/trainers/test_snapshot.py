"""A trainer's state file reads back to the bit or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.snapshot import Facts, read_state, write_state

FACTS = Facts(
    policy="solver", num_steps=3, num_warm_steps=None, micro_batch_ids=("b0", "b1"), num_trainable=17
)


def test_facts_and_tensors_read_back_to_the_bit(tmp_path: Path) -> None:
    tensors = {"sums/w": torch.tensor([1e-42, -0.0, float("nan")]), "rng/cpu": torch.get_rng_state()}
    write_state(tmp_path / "deep" / "state", FACTS, tensors)
    facts, read = read_state(tmp_path / "deep" / "state")
    assert facts == FACTS and read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_a_missing_state_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no trainer state"):
        read_state(tmp_path / "absent")


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_torn_state_is_an_error_of_ours(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "state"
    write_state(path, FACTS, {"w": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TrainerError, match="unreadable"):
        read_state(path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    facts = Facts(
        policy="p", num_steps=0, num_warm_steps=None, micro_batch_ids=(), num_trainable=0, schema_version=9
    )
    write_state(tmp_path / "state", facts, {"w": torch.ones(1)})
    with pytest.raises(TrainerError, match="schema_version 9"):
        read_state(tmp_path / "state")
