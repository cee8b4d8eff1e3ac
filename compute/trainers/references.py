"""The reference policy of a KL term: a frozen version, in memory only once it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megloom.compute.state.weights import read_manifest
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.publishing import load_version


class Reference:
    """Version `uri`, which must be of `policy`. Calling it gives its model, loaded at the first call."""

    def __init__(self, uri: str, *, policy: str, device: torch.device) -> None:
        self._folder, self._policy, self._device = Path(uri), policy, device
        self._model: Any = None

    def __call__(self) -> Any:
        """The frozen model.

        Raises: TrainerError if the version is of another policy; FileNotFoundError if it is not there.
        """
        if self._model is None:
            holder = read_manifest(self._folder, verified=False).policy
            if holder != self._policy:
                raise TrainerError(f"reference {self._folder} is of policy {holder}")
            model, _ = load_version(self._folder, self._device)
            self._model = model.requires_grad_(False)
        return self._model
