"""The one operation that SGLang takes from vLLM on a device without kernels of its own, in plain torch."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotates `query` and `key` in place by their positions.

    Shapes: `positions` [N]; `query`, `key` [N, heads * head_size]; `cos_sin_cache` [P, R], the cosines of the
    R / 2 frequencies before their sines. The first R numbers of a head are rotated. A pair is one number of
    each half with `is_neox`, else two neighbours.
    """
    num_tokens = positions.numel()
    cos_N1F, sin_N1F = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    num_frequencies = cos_N1F.shape[-1]
    shape, axis = ((2, num_frequencies), -2) if is_neox else ((num_frequencies, 2), -1)
    for states in (query, key):
        if states is None:
            continue
        rotated = states.view(num_tokens, -1, head_size)[..., : 2 * num_frequencies].unflatten(-1, shape)
        x, y = rotated.unbind(axis)
        rotated.copy_(torch.stack((x * cos_N1F - y * sin_N1F, x * sin_N1F + y * cos_N1F), dim=axis))
