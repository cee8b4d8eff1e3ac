"""Rotary position embedding as one complex multiplication.

Hugging Face pairs channel j of a head with channel j + D/2. Attention scores do not change when the
channels of queries and keys are permuted alike, so the projections are permuted once at load
(`interleave_heads`), pairs become neighbours, and a rotation is `complex(x) * cis(angle)`.
Source: RoFormer (Su et al. 2021); frequency scaling as in Llama 3.1.
"""

from __future__ import annotations

import math

import torch

from megloom.compute.engines.checkpoint import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Returns the angle per position `[D/2]` of each channel pair, float32 as the reference computes it."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths  # full turns in the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)  # 0: scaled in full, 1: left as it is
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rotations(frequencies: torch.Tensor, length: int) -> torch.Tensor:
    """Returns `cis(position · frequency)` `[length, D/2]`, complex64."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def interleave_heads(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the rows of `weight` `[heads · D, ...]` with the two halves of each head interleaved."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def rotate(heads: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Returns `heads` `[N, heads, D]`, interleaved, turned by `cis` `[N, 1, D/2]`; the dtype stays."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * cis).flatten(-2).to(heads.dtype)
