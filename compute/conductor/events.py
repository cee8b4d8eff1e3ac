"""The session's own log: one JSON line per decision or fact, in order, stamped with the session's clock.

In simulation two runs of one seed give byte-equal logs; in production the lines go to `events.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Clock = Callable[[], float]


class EventLog:
    """Keeps lines until `take` hands them over; the session writes them at each commit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: list[str] = []

    def add(self, kind: str, **fields: Any) -> None:
        entry = {"t": round(self._clock(), 6), "kind": kind, **fields}
        self._lines.append(json.dumps(entry, sort_keys=True, separators=(",", ":")))

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines
