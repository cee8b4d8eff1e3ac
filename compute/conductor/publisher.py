"""Brings a new weight version to every engine of its policy, in two phases.

1. Stage: the files are brought to every engine's node and verified while the engines serve the old version. A
   node that cannot take them is tried again a few times; then the publish is aborted and nothing has changed.
2. Switch: no call starts any more; every engine pauses, loads, says its version and answers the canary; then
   traffic returns. An engine that fails here is fenced (no traffic) and started anew on the new version.

An engine that is started anew, then or later, answers the canary of its version before it has traffic.

Traffic never meets a mix: no engine returns before all of the policy have stopped or are fenced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from megloom.compute.conductor.canary import Answer, Canary
from megloom.compute.conductor.dispatch import Dispatcher
from megloom.compute.conductor.events import EventLog
from megloom.compute.conductor.stager import Stager, StagingError
from megloom.compute.engines.protocol import Engine, EngineError, PauseMode
from megloom.compute.trainers.protocol import Published

log = logging.getLogger(__name__)
STAGE_TRIES = 3
STAGE_TIMEOUT_S = 600.0  # of one try: tens of gigabytes over a network
STAGE_BACKOFF_S = 0.5  # before the second try, doubled before the third
PAUSE_TIMEOUT_S = 30.0  # an engine pauses between two decode steps
LOAD_TIMEOUT_S = 120.0


class PublishAborted(Exception):
    """A version was not published: the old one serves everywhere, the new one's number is not used."""

    def __init__(self, policy: str, version: int, cause: str) -> None:
        super().__init__(f"publish of {policy}@{version} aborted, the old version serves on: {cause}")
        self.policy, self.version, self.cause = policy, version, cause


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What every engine of a policy must serve now."""

    version: int
    uri: str


class Publisher:
    """`fence` takes an engine out of service and has it started anew on the version in `serving`.

    `serving` moves before the first engine pauses: one that starts meanwhile starts on the new version.
    Without a `stager` engines load the published folder itself; without a `canary` a version that was loaded
    is believed.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        serving: Mapping[str, Serving],
        fence: Callable[[str, str], Awaitable[None]],
        events: EventLog,
        stager: Stager | None = None,
        canary: Canary | None = None,
    ) -> None:
        self._dispatcher, self._fence, self._events = dispatcher, fence, events
        self.serving = dict(serving)
        self._answers: dict[str, tuple[int, Answer]] = {}  # the served version, and an answer that was right
        self.stager, self.canary = stager, canary

    async def publish(self, policy: str, published: Published) -> None:
        """Returns when every engine in service serves the version.

        Raises: PublishAborted if it could not be staged everywhere; then nothing has changed.
        """
        staged = await self._stage_everywhere(policy, published)
        self.serving[policy] = Serving(version=published.version, uri=published.uri)
        self._dispatcher.hold(policy)
        try:
            engines = self._dispatcher.engines_of(policy)
            failed = await self._pause(engines)
            answers: dict[str, Answer] = {}
            for cell, cause in failed.items():
                self._dispatcher.engine_down(cell, cause)
            loading = {cell: engine for cell, engine in engines.items() if cell not in failed}
            for cell, outcome in (await self._load(loading, published, staged)).items():
                if isinstance(outcome, str):
                    failed[cell] = outcome
                elif outcome is not None:
                    answers[cell] = outcome
            if self.canary is not None:
                failed |= await self.canary.disagreements(policy, answers)
            if (right := next((cell for cell in answers if cell not in failed), None)) is not None:
                self._answers[policy] = published.version, answers[right]
            for cell, cause in failed.items():
                self._dispatcher.engine_down(cell, cause)
        finally:
            self._dispatcher.release(policy)
        async with asyncio.TaskGroup() as tasks:
            for cell, cause in failed.items():
                cause = f"publish of version {published.version} failed: {cause}"
                tasks.create_task(_awaited(self._fence(cell, cause)), name=f"fence:{cell}")
        self._events.add("published", policy=policy, version=published.version, engines=len(engines))

    async def check(self, policy: str, cell: str, engine: Engine) -> None:
        """Asks the canary of an engine that was started, if an answer of the served version is known.

        Raises: EngineError if its answer is another, or there is none.
        """
        version, first = self._answers.get(policy, (None, None))
        if self.canary is None or first is None or version != self.serving[policy].version:
            return
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                answer = await self.canary.ask(cell, engine, await engine.info())
        except TimeoutError:
            raise EngineError(f"{cell}: no canary within {LOAD_TIMEOUT_S:g} s") from None
        if (complaint := self.canary.difference(policy, answer, first)) is not None:
            raise EngineError(f"{cell}: version {version}: {complaint}")

    async def _stage_everywhere(self, policy: str, published: Published) -> dict[str, str]:
        """What each cell's engine is to load. Raises: PublishAborted."""
        if self.stager is None:
            return {}
        cells = list(self._dispatcher.engines_of(policy))
        outcomes = await asyncio.gather(
            *(self._stage(self.stager, cell, published) for cell in cells), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, StagingError):
                raise outcome
        failures = [str(outcome) for outcome in outcomes if isinstance(outcome, StagingError)]
        if failures:
            cause = "; ".join(failures)
            self._events.add("publish_aborted", policy=policy, version=published.version, cause=cause[:500])
            raise PublishAborted(policy, published.version, cause)
        return {cell: str(outcome) for cell, outcome in zip(cells, outcomes, strict=True)}

    async def _stage(self, stager: Stager, cell: str, published: Published) -> str:
        cause = ""
        for number in range(STAGE_TRIES):
            if number:
                await asyncio.sleep(STAGE_BACKOFF_S * 2 ** (number - 1))
            try:
                async with asyncio.timeout(STAGE_TIMEOUT_S):
                    return await stager.stage(cell, published)
            except StagingError as error:
                cause = str(error)
            except TimeoutError:
                cause = f"{cell}: not staged within {STAGE_TIMEOUT_S:g} s"
            log.warning("try %d of staging version %d: %s", number + 1, published.version, cause)
        raise StagingError(f"{cause} ({STAGE_TRIES} tries)")

    async def _pause(self, engines: Mapping[str, Engine]) -> dict[str, str]:
        """Pauses all engines; the cells that did not, with the cause."""

        async def pause(engine: Engine) -> str | None:
            try:
                async with asyncio.timeout(PAUSE_TIMEOUT_S):
                    await engine.pause(PauseMode.RETRACT)
                return None
            except EngineError as error:
                return str(error)
            except TimeoutError:
                return f"did not pause within {PAUSE_TIMEOUT_S:g} s"

        causes = await asyncio.gather(*(pause(engine) for engine in engines.values()))
        return {cell: cause for cell, cause in zip(engines, causes, strict=True) if cause is not None}

    async def _load(
        self, engines: Mapping[str, Engine], published: Published, staged: Mapping[str, str]
    ) -> dict[str, Answer | str | None]:
        """Loads the version everywhere: each cell's canary answer (None without one), or why it failed."""

        async def load(cell: str, engine: Engine) -> Answer | str | None:
            try:
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    folder = staged.get(cell, published.uri)
                    await engine.load_version(folder, published.version, published.digest)
                    await engine.resume()
                    info = await engine.info()
                    if info.version != published.version:
                        return f"says version {info.version}"
                    return await self.canary.ask(cell, engine, info) if self.canary else None
            except EngineError as error:
                return str(error)
            except TimeoutError:
                return f"not loaded within {LOAD_TIMEOUT_S:g} s"

        outcomes = await asyncio.gather(*(load(cell, engine) for cell, engine in engines.items()))
        return dict(zip(engines, outcomes, strict=True))


async def _awaited(work: Awaitable[None]) -> None:
    await work
