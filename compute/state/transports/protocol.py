"""What a way between nodes can do. The store verifies every digest itself: a transport only moves bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megloom.compute.state.index import Entry
from megloom.compute.state.keys import Key


class Transport(Protocol):
    """`name` is the kind ("file", "http", "mooncake"), as in `path_choice.TRANSPORT_RATES`.

    What a cache was given may be gone at any time, so it is never the only copy.
    """

    name: str
    is_cache: bool

    async def describe(self, key: Key) -> Entry | None:
        """The object on the other side, None if it has none of that key.

        Raises: TransportError if the other side does not answer.
        """
        ...

    async def fetch(self, entry: Entry, path: Path) -> None:
        """Fills `path`, a draft of the caller's, with the object's bytes.

        Raises: TransportError if they end early or the other side has other content by now.
        """
        ...

    async def push(self, entry: Entry, path: Path) -> None:
        """Gives the object to the other side; one that is there with the same digest stays.

        Raises: ConflictingState if it has other content; TransportError.
        """
        ...

    async def drop(self, key: Key) -> None:
        """Removes the object from the other side; one that is gone already is fine."""
        ...

    async def close(self) -> None: ...
