"""The ranks of one replica: how they find each other, and how they agree.

Gloo over loopback on a CPU, NCCL on a GPU; the rendezvous is a file, so no port is chosen. A killed peer is
an error at once, a hung one after the group's timeout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.ranks import ECHO

GROUP_TIMEOUT_S = 300.0  # the longest pass of a micro-batch, with room: ranks wait for the slowest one
_FAILED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process's place among the ranks of its replica."""

    rank: int
    world_size: int
    device: torch.device

    def exchange(self, value: int) -> list[int]:
        """What every rank brought, in their order; `value` is 0 or more. Collective.

        Raises: TrainerError if another rank brought `failed` instead.
        """
        values = self._gather(value)
        if _FAILED in values:
            raise TrainerError(f"{ECHO} {values.index(_FAILED)}")
        return values

    def failed(self) -> None:
        """Takes part in the others' `exchange`, which then raises there. Collective."""
        self._gather(_FAILED)

    def _gather(self, value: int) -> list[int]:
        if self.world_size == 1:
            return [value]
        mine = torch.tensor([value], dtype=torch.int64, device=self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyones, mine)
        return [int(one) for one in everyones]


def init_ranks(args: Mapping[str, Any]) -> None:
    """Joins the group that `args` name: `rank`, `world_size`, `rendezvous` (a path that no file has yet).

    Nothing happens without `world_size` or with 1. `group_timeout_s` may be given too. Call it once, before
    a model is loaded: every rank waits for all the others.
    """
    world_size = int(args.get("world_size", 1))
    if world_size > 1:
        _init(
            rank=int(args["rank"]),
            world_size=world_size,
            device_type=torch.device(args.get("plan", {}).get("device", "cpu")).type,
            init_method=f"file://{Path(args['rendezvous']).absolute()}",
            timeout_s=float(args.get("group_timeout_s", GROUP_TIMEOUT_S)),
        )


def join_ranks(device: torch.device) -> Ranks:
    """The ranks of this process's group; a group of one is made if `init_ranks` made none."""
    if not dist.is_initialized():
        _init(
            rank=0,
            world_size=1,
            device_type=device.type,
            store=dist.HashStore(),
            timeout_s=GROUP_TIMEOUT_S,
        )
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)


def _init(*, rank: int, world_size: int, device_type: str, timeout_s: float, **rendezvous: Any) -> None:
    # DeepSpeed insists on these; the ranks of a replica share a machine.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it looks up the host's name, which may fail
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        **rendezvous,
    )
