"""The two stand-ins that let SGLang be imported on a CPU; these tests need no SGLang."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from tests.sglang.server import STUBS

NUM_TOKENS, NUM_HEADS, HEAD_SIZE, NUM_POSITIONS = 5, 3, 8, 50


def load_custom_ops() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stub_custom_ops", STUBS / "vllm" / "_custom_ops.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rotate_slowly(
    states: torch.Tensor, positions: list[int], num_rotated: int, is_neox: bool
) -> torch.Tensor:
    """Each pair as a complex number, turned by position * 10000^(-2i / num_rotated), one by one."""
    expected = states.clone()
    half = num_rotated // 2
    for token, position in enumerate(positions):
        for head in range(NUM_HEADS):
            for index in range(half):
                a, b = (index, index + half) if is_neox else (2 * index, 2 * index + 1)
                first, second = head * HEAD_SIZE + a, head * HEAD_SIZE + b
                angle = torch.tensor(position * 10000.0 ** (-2 * index / num_rotated))
                turned = torch.complex(states[token, first], states[token, second])
                turned = turned * torch.polar(torch.tensor(1.0), angle)
                expected[token, first], expected[token, second] = turned.real, turned.imag
    return expected


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("num_rotated", [HEAD_SIZE, HEAD_SIZE // 2])
def test_rotary_embedding_turns_each_pair_in_place_by_its_position(is_neox: bool, num_rotated: int) -> None:
    positions = [0, 7, 3, 49, 1]
    frequencies = 10000.0 ** (-torch.arange(0, num_rotated, 2) / num_rotated)
    angles = torch.outer(torch.arange(NUM_POSITIONS), frequencies)
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    # SGLang passes slices of one packed tensor, which are not contiguous
    packed = torch.randn(NUM_TOKENS, 2 * NUM_HEADS * HEAD_SIZE, generator=torch.Generator().manual_seed(0))
    query, key = packed.split(NUM_HEADS * HEAD_SIZE, dim=-1)
    expected = [rotate_slowly(states.clone(), positions, num_rotated, is_neox) for states in (query, key)]
    load_custom_ops().rotary_embedding(torch.tensor(positions), query, key, HEAD_SIZE, cache, is_neox)
    torch.testing.assert_close(query, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(key, expected[1], atol=1e-5, rtol=0)


def test_torchvision_has_every_name_and_none_that_python_asks_for_itself() -> None:
    code = """
import torchvision.transforms.v2.functional as functional
from torchvision.transforms import InterpolationMode
assert InterpolationMode.BICUBIC == "BICUBIC"
assert isinstance(functional.resize, type)
assert not hasattr(functional, "__all__")
"""
    environment = {"PYTHONPATH": str(STUBS)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
