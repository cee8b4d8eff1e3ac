"""How long a trainer's verb may take before its process counts as lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megloom.compute.trainers.protocol import TrainerLost

VERB_TIMEOUT_S = 3600.0  # of one verb: a process that computes for longer hangs


class Deadlines:
    """Those of one policy's replicas. A wait for a cell, or for another verb, is not under them."""

    def __init__(self, policy: str, timeout_s: float = VERB_TIMEOUT_S) -> None:
        self._policy, self._timeout_s = policy, timeout_s

    @asynccontextmanager
    async def of(self, verb: str) -> AsyncIterator[None]:
        """Raises: TrainerLost that names the verb, if the block takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            waited = f"no answer within {self._timeout_s:g} s"
            raise TrainerLost(f"policy={self._policy} {verb}: {waited}") from None
