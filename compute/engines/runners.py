"""Which runner serves a model: compiled kernels where they gain, torch's operators elsewhere."""

from __future__ import annotations

import logging

import torch

from megloom.compute.engines.checkpoint import ModelConfig
from megloom.compute.engines.model import Weights
from megloom.compute.engines.runner import Runner, TorchRunner

try:
    from megloom.compute.engines import compiled
except ImportError as error:  # numba lags behind new Python versions
    _MISSING = f"no compiler: {error}"
else:
    _MISSING = ""

log = logging.getLogger(__name__)


def choose_runner(
    config: ModelConfig, weights: Weights, *, device: torch.device, dtype: torch.dtype
) -> Runner:
    """Returns the runner for a model; says in the log why, where it is torch's."""
    reason = _MISSING or compiled.unfit_reason(config, device, dtype)
    if reason:
        log.warning("decoding by torch operators: %s", reason)
        return TorchRunner(config, weights, device=device, dtype=dtype)
    return compiled.CompiledRunner(config, weights)
