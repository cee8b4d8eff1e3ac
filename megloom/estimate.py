"""How long a step of the SmolLM2 demo takes on this machine, from its matrix multiply rate."""

from __future__ import annotations

import os
import time

import numpy as np

# A step samples and trains about 3,500 tokens of a model with 135 M parameters: 2 FLOP per token and
# parameter to sample, 6 to train, which is 3,800 GFLOP; copying 540 MB of weights costs a fifth more.
STEP_GFLOP = 4600.0
_SIZE, _ROUNDS = 512, 8


def gemm_gflop_per_s() -> float:
    """float32 matrix multiply on all cores, best of a few rounds (0.1 s)."""
    left = np.ones((_SIZE, _SIZE), dtype=np.float32)
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - started)
    return 2 * _SIZE**3 / best / 1e9


def smollm2_step_s() -> float:
    """Seconds of a step; engine and trainer take turns, with one thread each."""
    return STEP_GFLOP / (gemm_gflop_per_s() / (os.cpu_count() or 1))
