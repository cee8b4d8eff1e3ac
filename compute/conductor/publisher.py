"""Brings a new weight version to every engine of its policy: pause, verify and load, resume.

Two phases: every engine pauses and loads; an engine that fails is fenced (no traffic) and started anew by
the session. Traffic never meets a mix: calls go only to engines on the committed version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from megloom.compute.conductor.dispatch import Dispatcher
from megloom.compute.conductor.events import EventLog
from megloom.compute.engines.protocol import Engine, EngineError, PauseMode
from megloom.compute.trainers.protocol import Published

log = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What every engine of a policy must serve now."""

    version: int
    uri: str


class Publisher:
    """`fence` takes an engine out of service and has it started anew on the version in `serving`.

    `serving` moves before the first engine loads: one that starts meanwhile starts on the new version.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        serving: Mapping[str, Serving],
        fence: Callable[[str, str], Awaitable[None]],
        events: EventLog,
    ) -> None:
        self._dispatcher, self._fence, self._events = dispatcher, fence, events
        self.serving = dict(serving)

    async def publish(self, policy: str, published: Published) -> None:
        """Returns when every engine in service serves the version."""
        self.serving[policy] = Serving(version=published.version, uri=published.uri)
        engines = self._dispatcher.engines_of(policy)
        async with asyncio.TaskGroup() as tasks:
            for cell, engine in engines.items():
                tasks.create_task(self._load(cell, engine, published), name=f"publish:{cell}")
        self._events.add("published", policy=policy, version=published.version, engines=len(engines))

    async def _load(self, cell: str, engine: Engine, published: Published) -> None:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await engine.pause(PauseMode.RETRACT)
                await engine.load_version(published.uri, published.version, published.digest)
                await engine.resume()
                info = await engine.info()
            if info.version != published.version:
                raise EngineError(f"{cell}: says version {info.version}, expected {published.version}")
        except (EngineError, TimeoutError) as error:
            await self._fence(cell, f"publish of version {published.version} failed: {error}")
