"""Where a session's cells come from: real processes, or models in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from megloom.compute.engines.protocol import Engine
from megloom.compute.gateway.protocol import CallDesk, Gateway
from megloom.compute.rollout.protocol import EpisodeEvents, Worker
from megloom.compute.trainers.protocol import Trainer, TrainerPlan
from megloom.compute.trainers.suspended import StateShelf


@dataclass(frozen=True, kw_only=True, slots=True)
class CellExit:
    """A process of the session ended by itself; `cause` holds its exit code and last log lines."""

    name: str
    incarnation: int
    cause: str


class Backend(Protocol):
    """Starts named cells. A cell that is started again under its name replaces the dead one.

    `shelf` keeps the states of trainers that were suspended; they are of use to this session only.
    """

    exits: asyncio.Queue[CellExit]

    @property
    def shelf(self) -> StateShelf: ...

    async def start_worker(self, name: str, events: EpisodeEvents) -> Worker: ...
    async def start_trainer(self, name: str, plan: TrainerPlan) -> Trainer: ...
    async def start_engine(self, name: str, *, policy: str, uri: str, version: int) -> Engine: ...
    async def start_gateway(self, name: str, desk: CallDesk) -> Gateway: ...
    def new_token(self) -> str:
        """A secret that nobody can guess."""
        ...

    def incarnation(self, name: str) -> int:
        """How often the cell was started; tells a late exit of an earlier life from one of this life."""
        ...

    async def stop(self, name: str) -> None:
        """Ends a cell; its exit is not reported."""
        ...

    async def close(self) -> None: ...
