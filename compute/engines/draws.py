"""Draws a token from a row of logits as machine code, by the rule of `sampling.py` without truncation.

Called by `kernels.py` only. Shapes: V vocabulary, P columns of V rounded up to a panel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from megloom.compute.engines.layers import UNLIKELY
from megloom.compute.engines.vectors import (
    WIDTH,
    add,
    divide,
    exponential,
    larger,
    largest,
    load,
    spread,
    store,
    subtract,
    total,
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S11, _S27, _S30, _S31 = (np.uint64(count) for count in (11, 27, 30, 31))


@njit
def _scramble(bits: Any) -> Any:
    bits = (bits ^ (bits >> _S30)) * _FIRST
    bits = (bits ^ (bits >> _S27)) * _SECOND
    return bits ^ (bits >> _S31)


@njit
def uniform_number(seed: Any, position: int) -> float:
    """Returns `sampling.uniforms` of one seed and position."""
    bits = _scramble(_scramble(seed + _GOLDEN) ^ (np.uint64(position + 1) * _GOLDEN))
    return np.float64(bits >> _S11) * 2.0**-53


@njit
def _log_softmax(logits: Any, at: int, vocab_size: int, temperature: Any, logprobs: Any) -> None:
    """Writes a row's logprobs at a temperature; 0 counts as 1."""
    scale = spread(temperature if temperature > 0 else np.float32(1))
    highest = spread(UNLIKELY)
    for i in range(0, len(logprobs), WIDTH):
        store(logprobs, i, divide(load(logits, at + i), scale))
    for i in range(vocab_size, len(logprobs)):
        logprobs[i] = UNLIKELY
    for i in range(0, len(logprobs), WIDTH):
        highest = larger(load(logprobs, i), highest)
    peak = spread(largest(highest))
    sums = spread(np.float32(0))
    for i in range(0, len(logprobs), WIDTH):
        sums = add(sums, exponential(subtract(load(logprobs, i), peak)))
    log_sum = spread(np.float32(math.log(total(sums))))
    for i in range(0, len(logprobs), WIDTH):
        store(logprobs, i, subtract(subtract(load(logprobs, i), peak), log_sum))


@njit
def draw(
    logits: Any, row: int, vocab_size: int, temperature: Any, uniform: float, logprobs: Any, ps: Any
) -> int:
    """Returns the id that `sampling.sample` draws for a row; writes its logprobs, `ps` is scratch."""
    _log_softmax(logits, row * len(ps), vocab_size, temperature, logprobs)
    if temperature <= 0:
        best = 0
        for i in range(vocab_size):
            if logprobs[i] > logprobs[best]:
                best = i
        return best
    even = odd = 0.0
    for i in range(0, len(ps), WIDTH):
        store(ps, i, exponential(load(logprobs, i)))
    for i in range(0, len(ps), 2):  # the columns behind the vocabulary hold e^-87
        even, odd = even + ps[i], odd + ps[i + 1]
    target = uniform * (even + odd)
    mass = 0.0
    for i in range(vocab_size):
        mass += ps[i]
        if mass > target:
            return i
    return vocab_size - 1
