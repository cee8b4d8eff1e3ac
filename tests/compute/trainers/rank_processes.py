"""Replicas of several ranks in processes of their own, as the conductor would hold them."""

from __future__ import annotations

import multiprocessing
import tempfile
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path

from megloom.compute.trainers.client import connect_trainer
from megloom.compute.trainers.protocol import TrainerPlan
from megloom.compute.trainers.ranks import RankedTrainer
from megloom.compute.trainers.server import serve

START_TIMEOUT_S = 100.0  # the first process waits for the fork server's imports
GROUP_TIMEOUT_S = 60.0


class RankProcesses:
    """Starts replicas; all of their processes are killed at the end."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["megloom.compute.trainers.server", "megloom.compute.trainers.deepspeed_preload"]
        )
        self._folder = Path(tempfile.mkdtemp(prefix="megloom-"))  # socket paths are at most 107 bytes
        self._started: list[BaseProcess] = []

    async def start(self, plan: TrainerPlan, num_ranks: int) -> tuple[RankedTrainer, list[BaseProcess]]:
        """A replica of `num_ranks` processes, not loaded yet."""
        first = len(self._started)
        sockets = [self._folder / str(first + rank) for rank in range(num_ranks)]
        for rank, socket in enumerate(sockets):
            args = {
                "socket": str(socket),
                "plan": asdict(plan),
                "cache_dir": str(self._folder),
                "rank": rank,
                "world_size": num_ranks,
                "rendezvous": str(self._folder / f"{first}.rendezvous"),
                "group_timeout_s": GROUP_TIMEOUT_S,
            }
            process = self._context.Process(target=serve, args=(args,), daemon=True)
            process.start()
            self._started.append(process)
        clients = [
            await connect_trainer(plan.policy, socket, timeout_s=START_TIMEOUT_S) for socket in sockets
        ]
        return RankedTrainer(plan.policy, clients), self._started[first:]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.join()
            process.close()
