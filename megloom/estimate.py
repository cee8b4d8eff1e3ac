"""How long a step of the SmolLM2 demo takes on this machine, from its matrix multiply rate."""

from __future__ import annotations

import time

import numpy as np

STEP_GFLOP = 1.0  # set from measurement, see docs/results.md
_SIZE, _ROUNDS = 512, 8


def gemm_gflop_per_s() -> float:
    """float32 matrix multiply of one thread-pool, best of a few rounds (0.1 s)."""
    left = np.ones((_SIZE, _SIZE), dtype=np.float32)
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - started)
    return 2 * _SIZE**3 / best / 1e9


def smollm2_step_s() -> float:
    return STEP_GFLOP / gemm_gflop_per_s()
