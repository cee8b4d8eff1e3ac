"""Imported by a fork server, so that its children have deepspeed ready: half a second less for each.

Nothing happens without deepspeed, or on a machine with a GPU: there the kind of device is the child's choice.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import torch

from megloom.compute.trainers.deepspeed_import import import_deepspeed, quiet

if importlib.util.find_spec("deepspeed") is not None and not Path("/dev/nvidiactl").exists():
    import_deepspeed(torch.device("cpu"))
    with quiet():
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # else in `initialize`
