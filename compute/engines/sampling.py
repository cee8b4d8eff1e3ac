"""Draws one token per row by inverse transform sampling with counter-based random numbers.

The uniform number of a token is a hash of (seed, absolute position), so the same seed draws the same tokens
whatever else is in the batch, up to the float noise of the logits; and a request that is resubmitted with
its partial output appended goes on as if it had never been interrupted.
Source: SplitMix64 (Steele, Lea, Flood 2014) finaliser, applied twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingColumns:
    """The sampling parameters of a batch, one entry per row; built anew when the rows change.

    `temperatures` `[B, 1]`, None if all are 1; greedy rows hold 1. `greedy`, `top_p` and `top_k` are None
    where no row uses them.
    """

    seeds: np.ndarray
    temperatures: torch.Tensor | None
    greedy: torch.Tensor | None
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None


def sampling_columns(
    rows: list[tuple[int, float, float, int]], vocab_size: int, device: torch.device
) -> SamplingColumns:
    """Returns the columns of rows (seed, temperature, top_p, top_k)."""
    seeds, temperatures, top_ps, top_ks = zip(*rows, strict=True)
    greedy = [temperature == 0 for temperature in temperatures]
    scales = [temperature or 1.0 for temperature in temperatures]

    def column(values: list[float] | list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    return SamplingColumns(
        seeds=np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64),
        temperatures=None if all(scale == 1.0 for scale in scales) else column(scales),
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        top_p=column(list(top_ps)) if any(top_p < 1 for top_p in top_ps) else None,
        top_k=column([vocab_size if top_k < 0 else min(top_k, vocab_size) for top_k in top_ks])
        if any(top_k > 0 for top_k in top_ks)
        else None,
    )


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns one float64 in [0, 1) per (seed, position), both `[B]` uint64."""
    bits = _mix(_mix(seeds + _GOLDEN) ^ ((positions + np.uint64(1)) * _GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _truncate(probabilities: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Returns the probabilities with all but each row's top-k and top-p support set to zero."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    dropped = torch.zeros_like(ordered, dtype=torch.bool)
    if columns.top_k is not None:
        dropped |= torch.arange(ordered.shape[-1], device=ordered.device) >= columns.top_k
    if columns.top_p is not None:
        dropped |= ordered.cumsum(-1) - ordered >= columns.top_p
    dropped[:, 0] = False
    return probabilities.masked_fill(dropped.gather(-1, order.argsort(-1)), 0.0)


@torch.inference_mode()
def sample(
    logits: torch.Tensor, columns: SamplingColumns, positions: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids `[B]`, logprobs `[B]`) drawn from `logits` `[B, V]`.

    `positions` `[B]` uint64 are those that the drawn tokens will take. The logprob is that of the full
    distribution at the row's temperature, also when top-p or top-k narrowed the draw.
    """
    scaled = logits if columns.temperatures is None else logits / columns.temperatures
    logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities = logprobs.exp()
    if columns.top_p is not None or columns.top_k is not None:
        probabilities = _truncate(probabilities, columns)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    draws = torch.from_numpy(uniforms(columns.seeds, positions)).to(logits.device).unsqueeze(1)
    # the first id whose cumulative mass exceeds the draw; such an id always has mass of its own
    ids = (cumulative <= draws * cumulative[:, -1:]).sum(-1).clamp_(max=logits.shape[-1] - 1)
    if columns.greedy is not None:
        ids = torch.where(columns.greedy, logits.argmax(-1), ids)
    return ids, logprobs.gather(-1, ids.unsqueeze(1)).squeeze(1)
