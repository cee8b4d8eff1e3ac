"""Counts the operations that could leave something half done, and kills its own process at a chosen one.

An operation has three places to die: before it, midway (only writes: half of the bytes are there) and after
it. The numbers are the same in every life that starts from the same files, so a kill replays.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from megloom.compute.store.files import Folder

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# What the store, the weights and the trainers' states change a disk with.
DISK_CALLS = ("link", "rename", "replace", "unlink", "rmdir", "mkdir", "fsync")


class Tripwire:
    """`at` is the number of the deadly operation, None lets the process live; `names` is what was passed."""

    def __init__(self, *, at: int | None, place: str) -> None:
        self._at, self._place = at, place
        self.names: list[str] = []

    def before(self, name: str) -> int:
        """Announces an operation and returns its number."""
        number = len(self.names)
        self.names.append(name)
        if self._place == "before":
            self._die_if(number)
        return number

    def midway(self, number: int, half: Callable[[], object]) -> None:
        """Does half of the operation and dies, if it is the one."""
        if self._at == number and self._place == "midway":
            half()
            self._die_if(number)

    def after(self, number: int) -> None:
        # An operation that has no half dies after the whole.
        if self._place != "before":
            self._die_if(number)

    def wrap(self, name: str, work: Callable[..., T]) -> Callable[..., T]:
        """`work` as an operation."""

        def wired(*args: Any, **keywords: Any) -> T:
            number = self.before(name)
            result = work(*args, **keywords)
            self.after(number)
            return result

        return wired

    def _die_if(self, number: int) -> None:
        if self._at == number:
            os.kill(os.getpid(), signal.SIGKILL)


class WiredOffload:
    """An inline `Offload`: every piece of blocking work that the store hands over is an operation."""

    def __init__(self, wire: Tripwire) -> None:
        self._wire = wire

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        name = getattr(fn, "__name__", type(fn).__name__)
        return self._wire.wrap(f"offload {name}", fn)(*args)


def wire_the_disk(wire: Tripwire) -> None:
    """Makes each change of the file system by this process an operation. For a process that ends soon."""
    for name in DISK_CALLS:
        setattr(os, name, wire.wrap(name, getattr(os, name)))
    whole_file, whole_object = Path.write_bytes, Folder.write

    def write_bytes(path: Path, data: bytes) -> int:
        number = wire.before(f"write_bytes {path.name}")
        wire.midway(number, lambda: whole_file(path, data[: len(data) // 2]))
        size = whole_file(path, data)
        wire.after(number)
        return size

    def write(folder: Folder, path: str, data: bytes) -> None:
        number = wire.before(f"write {path}")
        wire.midway(number, lambda: whole_object(folder, path, data[: len(data) // 2]))
        whole_object(folder, path, data)
        wire.after(number)

    Path.write_bytes = write_bytes  # type: ignore[method-assign,assignment]
    Folder.write = write  # type: ignore[method-assign]
