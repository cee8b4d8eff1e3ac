"""Where else a state can come from: the other nodes, the URL below the tiers, a trainer's device.

Asks all of them, compares what they say, and puts them in the order of `path_choice`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megloom.compute.state.errors import ConflictingState, TransportError
from megloom.compute.state.index import Entry
from megloom.compute.state.keys import Key
from megloom.compute.state.path_choice import Hardware, Place, ranked
from megloom.compute.state.tiers import Tier
from megloom.compute.state.transports.protocol import Transport

log = logging.getLogger(__name__)

Export = Callable[[Path], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCopy:
    """A state in a trainer's memory. `export` writes its file: the training backend's D2H."""

    place: Place
    size_bytes: int
    export: Export


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """`transport` brings the bytes that `entry` describes from `place`."""

    place: Place
    entry: Entry
    transport: Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The sources, best first, and why others cannot be asked."""

    sources: list[Source]
    causes: list[str]


class Sources:
    """`peers` are the ways to other nodes, by the node's name; `remote` is the way to the URL, if any."""

    def __init__(
        self, node: str, peers: Mapping[str, Transport], remote: Transport | None, hardware: Hardware
    ) -> None:
        self._node = node
        self.peers, self._remote = dict(peers), remote
        ways = {(peer, node): (transport.name,) for peer, transport in peers.items()}
        self.hardware = replace(hardware, transports={**hardware.transports, **ways})

    async def find(self, key: Key, known: Entry | None) -> Found:
        """Asks every source at once for `key`. What differs from `known` is a cause, not a source.

        Raises: ConflictingState if sources disagree and nothing is known here.
        """
        transports = {Place(node=name, tier=Tier.DISK): way for name, way in self.peers.items()}
        if self._remote is not None:
            transports[Place(node="", tier=Tier.REMOTE)] = self._remote
        answers = await asyncio.gather(*(self._ask(place, way, key) for place, way in transports.items()))
        causes = [answer for answer in answers if isinstance(answer, str)]
        found: dict[Place, Entry] = {}
        for place, answer in zip(transports, answers, strict=True):
            if isinstance(answer, Entry):
                if known is not None and answer.digest != known.digest:
                    causes.append(f"{name_of(place)} has digest {answer.digest}, expected {known.digest}")
                else:
                    found[place] = answer
        if len({entry.digest for entry in found.values()}) > 1:
            said = ", ".join(f"{name_of(place)} {entry.digest}" for place, entry in sorted(found.items()))
            raise ConflictingState(f"state {key}: nodes hold different content: {said}")
        size_bytes = max((entry.size_bytes for entry in found.values()), default=0)
        wanted = Place(node=self._node, tier=Tier.TMPFS)
        order = [plan.source for plan in ranked(found, wanted, size_bytes, self.hardware)]
        sources = [Source(place=at, entry=found[at], transport=transports[at]) for at in order]
        return Found(sources=sources, causes=causes)

    async def close(self) -> None:
        for transport in (*self.peers.values(), *([self._remote] if self._remote else [])):
            await transport.close()

    async def _ask(self, place: Place, transport: Transport, key: Key) -> Entry | str | None:
        try:
            return await transport.describe(key)
        except TransportError as error:
            log.warning("key=%s source=%s: not asked: %s", key, name_of(place), error)
            return str(error)


def name_of(place: Place) -> str:
    return f"node {place.node}" if place.node else str(place.tier)
