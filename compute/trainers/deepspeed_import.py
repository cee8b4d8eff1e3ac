"""The one place that imports deepspeed, with its surroundings made safe first.

On a CPU it would look for a C++ compiler, compile kernels for a minute and pull in torch's compiler.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

GATHER_WARNING = r"`torch\.distributed\.\w+` is deprecated"


def import_deepspeed(device: torch.device) -> Any:
    """The package, ready for `initialize` on `device`; a process uses one kind of device.

    Raises: ModuleNotFoundError naming the extra, if it is not installed.
    """
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # 2 CPU seconds at the first `initialize`
    with quiet():
        try:
            import deepspeed
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f'{error}: backend "deepspeed" needs the extra "deepspeed"') from error
        if device.type == "cpu":
            # Shared-memory collectives, compiled at their first use: without a compiler that is an error.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Stage 3 gathers in every module's forward, which others call: `quiet` is not around that.
    warnings.filterwarnings("ignore", GATHER_WARNING, FutureWarning)
    return deepspeed


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out the warnings that deepspeed's own calls of torch raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield
