"""What a program printed, bounded: its first and its last bytes, however much came between."""

from __future__ import annotations


class BoundedOutput:
    """Keeps at most `max_bytes`, half of them from the beginning and half from the end."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        self._head, self._tail = bytearray(), bytearray()
        self._total = 0

    def add(self, piece: bytes) -> None:
        self._total += len(piece)
        room = self._half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        if len(self._tail) > 2 * self._half:  # cut seldom: a cut moves what stays
            del self._tail[: -self._half]

    def text(self) -> str:
        """The text, with the number of bytes that are left out where they were."""
        tail = self._tail[-self._half :]
        left_out = self._total - len(self._head) - len(tail)
        between = f"\n[... {left_out} bytes left out ...]\n" if left_out else ""
        return _text(self._head) + between + _text(tail)


def _text(data: bytearray) -> str:
    return data.decode(errors="replace")
