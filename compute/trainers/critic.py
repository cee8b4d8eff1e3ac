"""The critic: a linear head on the policy's last hidden states, its loss, and its file beside the weights.

The head starts at zero, so that the first values are 0 and the first value gradients leave the policy's own
layers alone. Its loss does reach them later: policy and critic share all layers below. Shapes as in `heads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megloom.compute.trainers.protocol import TrainerError

VALUE_HEAD = "value_head"
CRITIC_FILE = "critic.safetensors"


def make_value_head(model: Any, device: torch.device) -> nn.Linear:
    """A head [H] → 1 of zeros, in float32."""
    head = nn.Linear(model.config.hidden_size, 1, device=device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def value_losses(values_N: Tensor, *, returns_N: Tensor, old_values_N: Tensor, clip: float | None) -> Tensor:
    """½ (V − R)² per token; with clip c the larger of that and ½ (clip(V, V_old − c, V_old + c) − R)².

    Source: the clipped value loss of PPO's reference implementation (OpenAI baselines, ppo2).
    """
    plain_N = (values_N - returns_N).square()
    if clip is None:
        return 0.5 * plain_N
    bounded_N = torch.clamp(values_N, old_values_N - clip, old_values_N + clip)
    return 0.5 * torch.maximum(plain_N, (bounded_N - returns_N).square())


def save_critic(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes the head's parameters ("value_head.weight", …) into a version's folder."""
    save_file(dict(weights), folder / CRITIC_FILE, metadata={"format": "pt"})


def load_critic(head: nn.Module, folder: Path) -> None:
    """Takes the head's parameters from a version's folder; without the file the head stays as it is.

    Raises: TrainerError for a file that is unreadable or of another head.
    """
    path = folder / CRITIC_FILE
    if not path.is_file():
        return  # version 0, or a policy that had no critic until now
    try:
        tensors = load_file(path)
        head.load_state_dict({name.removeprefix(f"{VALUE_HEAD}."): value for name, value in tensors.items()})
    except (SafetensorError, RuntimeError) as error:
        raise TrainerError(f"{path} is no critic of this model: {error}") from error
