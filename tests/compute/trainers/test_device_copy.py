"""Tensors go to state files without a change, from any device that is here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megloom.compute.state.digests import file_digest
from megloom.compute.trainers.device_copy import HostBuffers, save_tensors


def tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "weight": torch.rand(300, 70, generator=generator),
        "transposed": torch.rand(20, 30, generator=generator).t(),
        "bf16": torch.rand(1001, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "rng": torch.randint(0, 255, (5056,), generator=generator, dtype=torch.uint8),
        "flag": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    buffers = HostBuffers()
    return first.shape == second.shape and buffers.host_bytes(first) == buffers.host_bytes(second)


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = tensors()
    written = save_tensors(tmp_path / "state", state, {"facts": "{}"})
    assert written.digest == file_digest(tmp_path / "state")
    back = load_file(tmp_path / "state")
    assert set(back) == set(state)
    assert all(
        same_bits(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in state.items()
    )


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'z': dtype torch.complex64"):
        save_tensors(tmp_path / "state", {"z": torch.zeros(1, dtype=torch.complex64)}, {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: D2H is a real copy there")
def test_a_state_goes_from_a_device_to_a_file(tmp_path: Path) -> None:
    state = tensors("cuda")
    large = torch.rand(3_000_001, device="cuda")
    buffers = HostBuffers(size_bytes=1 << 20)
    assert bytes(buffers.host_bytes(large)) == bytes(HostBuffers().host_bytes(large.cpu()))
    save_tensors(tmp_path / "state", state, {})
    back = load_file(tmp_path / "state")
    assert all(same_bits(tensor, state[name].cpu()) for name, tensor in back.items())
