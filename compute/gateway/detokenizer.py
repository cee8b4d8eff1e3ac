"""Token ids to text while they come, whole characters only. Pure.

A character may be spread over several tokens, and a decoder may put a space before the first token that it is
given. So the tokens of the piece before stay in the window as context, and a text that ends with the
replacement character waits for more. Text is a view: bytes that are none become U+FFFD, ids stay the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A character has at most 4 bytes and a token at least one: what this many tokens did not complete is no text.
MAX_WAITING = 8
REPLACEMENT = "\ufffd"


class Detokenizer:
    """`feed` gives the text that new ids add; `finish` what still waited."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_read = 0  # how much of the window is context, its text passed on already

    def feed(self, token_ids: Sequence[int]) -> str:
        """The whole characters that are complete with `token_ids`."""
        if not token_ids:
            return ""
        whole = self._read([*self._window, *token_ids])
        if whole is not None and not whole.endswith(REPLACEMENT):
            self._pass([*self._window, *token_ids])
            return whole
        return "".join(self._feed_one(token_id) for token_id in token_ids)

    def finish(self) -> str:
        """The text of what is left, complete or not."""
        rest = self._read(self._window) or ""
        self._pass(self._window)
        return rest

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._read(self._window)
        num_waiting = len(self._window) - self._num_read
        if text is None or (text.endswith(REPLACEMENT) and num_waiting <= MAX_WAITING):
            return ""
        self._pass(self._window)
        return text

    def _read(self, window: Sequence[int]) -> str | None:
        """The text that the window has beyond its context; None where it has none (yet)."""
        before = self._decode(window[: self._num_read]) if self._num_read else ""
        text = self._decode(window)
        return text[len(before) :] if len(text) > len(before) else None

    def _pass(self, window: Sequence[int]) -> None:
        self._window = list(window[self._num_read :])
        self._num_read = len(self._window)
