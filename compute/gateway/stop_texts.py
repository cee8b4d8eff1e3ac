"""Stop texts in a text that grows: what may be passed on, and where the answer ends. Pure.

Used by a call that streams or cuts an answer; `beginning_at_end` also by the parser of tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence


def beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `markers` (never all of it)."""
    longest = max((len(marker) for marker in markers), default=0) - 1
    end = text[-longest:] if longest > 0 else ""
    if not any(marker[0] in end for marker in markers):  # nearly always, and this is asked for every piece
        return 0
    for size in range(len(end), 0, -1):
        tail = text[-size:]
        if any(len(marker) > size and marker.startswith(tail) for marker in markers):
            return size
    return 0


class StopTexts:
    """Passes on a text up to the first of `stops`, which is left out; holds back what may begin one.

    Where two stops begin at the same place the longer one counts only if the shorter has not come first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What of the text so far may be passed on now. Nothing after `found` is set."""
        if self.found is not None:
            return ""
        self._held += text
        # The stop that is complete first ends the answer, as it does where one reads character by character.
        ends = [
            (at + len(stop), -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        if ends:
            end, _, self.found = min(ends)
            passed, self._held = self._held[: end - len(self.found)], ""
            return passed
        keep = len(self._held) - beginning_at_end(self._held, self._stops)
        passed, self._held = self._held[:keep], self._held[keep:]
        return passed

    def finish(self) -> str:
        """What was held back: the text has ended and it was no stop after all."""
        held, self._held = self._held, ""
        return held
