"""Folders that cannot be served are refused with the reason, before anything is replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megloom.compute.engines.checkpoint import read_config, read_tensors, verify
from megloom.compute.state.digests import file_digest


@pytest.fixture
def folder(model_dir, tmp_path):
    return Path(shutil.copytree(model_dir, tmp_path / "model"))


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": None},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
        {"hidden_size": None},
    ],
)
def test_config_that_the_engine_cannot_run_is_refused(folder, changes):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(folder)


def test_configs_of_transformers_four_are_read(folder):
    new = read_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    change_config(folder, rope_parameters=None, rope_theta=raw["rope_parameters"]["rope_theta"])
    assert read_config(folder) == new


def test_end_ids_may_be_one_or_several(folder):
    change_config(folder, eos_token_id=7)
    assert read_config(folder).eos_token_ids == (7,)
    change_config(folder, eos_token_id=[7, 8])
    assert read_config(folder).eos_token_ids == (7, 8)


def test_tensor_of_another_shape_is_named(folder):
    change_config(folder, intermediate_size=64)
    with pytest.raises(ValueError, match=r"gate_proj.*expected shape \(64, 32\)"):
        read_tensors(folder, read_config(folder), device=torch.device("cpu"), dtype=torch.float32)


def test_tensors_do_not_follow_later_writes_to_the_file(folder):
    config = read_config(folder)
    tensors = read_tensors(folder, config, device=torch.device("cpu"), dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\x01" * 4096)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_digest_is_checked_from_the_caller_and_from_the_manifest(folder):
    digest = file_digest(folder / "model.safetensors")
    verify(folder, None)
    verify(folder, digest)
    with pytest.raises(ValueError, match=digest):
        verify(folder, "ab" * 64)
    (folder / "manifest.json").write_text(json.dumps({"digest": "cd" * 64}))
    for given in (None, digest):
        with pytest.raises(ValueError, match="cd" * 64):
            verify(folder, given)
    (folder / "manifest.json").write_text(json.dumps({"digest": digest}))
    verify(folder, digest)
