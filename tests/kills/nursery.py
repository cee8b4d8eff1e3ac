"""A process that has imported everything and forks a life in milliseconds. It has one thread.

`Nursery` is the test's side. The process reads one order per line and answers one line: the signal that ended
the life (0 for none), its exit code, the seconds it took, whether it hung, and what it told.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tests.kills.life import Order, line_writer, live

# Libraries that start a thread at import: a fork would copy the lock that it holds, and not the thread.
THREADLESS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
LIFE_TIMEOUT_S = 60.0  # a life takes a fraction of a second; one that hangs must not hang the tests


@dataclass(frozen=True, kw_only=True, slots=True)
class Lived:
    """How a life ended. `told` are its messages; a clean end is told last, with its state."""

    signal: int
    exit_code: int
    seconds: float
    is_hung: bool
    told: tuple[dict[str, Any], ...]

    @property
    def was_killed(self) -> bool:
        return self.signal == signal.SIGKILL

    @property
    def end(self) -> dict[str, Any]:
        """Its last message. Raises: AssertionError, with what it left, if it neither ended nor was killed."""
        assert self.told and "state" in self.told[-1], f"no end: {self.exit_code=} {self.told[-1:]}"
        return self.told[-1]


class Nursery:
    """Starts lives, one at a time."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers

    def live(self, order: Order) -> Lived:
        """Returns when the life is over."""
        self._requests.write(json.dumps(asdict(order)) + "\n")
        self._requests.flush()
        answer = self._answers.readline()
        assert answer, f"the nursery died over {order}"
        fields = json.loads(answer)
        return Lived(**{**fields, "told": tuple(fields["told"])})


@contextmanager
def nursery() -> Iterator[Nursery]:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kills.nursery"],
        cwd=root,
        env={**os.environ, **THREADLESS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:  # closing its input ends it
        yield Nursery(process.stdin, process.stdout)
        process.stdin.close()


def _raise_one(order: Order) -> Lived:
    reading, writing = os.pipe()
    started_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(order, writing)
    os.close(writing)
    told, is_hung = _listen(pid, reading, order.kill_after_s)
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    seconds = time.monotonic() - started_s
    return Lived(signal=killed, exit_code=code, seconds=seconds, is_hung=is_hung, told=tuple(told))


def _become(order: Order, writing: int) -> None:
    """The child: lives, and never returns into the nursery's loop, whatever happens."""
    code = 1
    try:
        live(order, line_writer(writing))
        code = 0
    except BaseException:
        line_writer(writing)({"error": traceback.format_exc()})
    finally:
        os._exit(code)


def _listen(pid: int, reading: int, kill_after_s: float | None) -> tuple[list[dict[str, Any]], bool]:
    """What the child tells until it is gone, and whether it hung. Kills it at its time."""
    data, is_hung = bytearray(), False
    kill_at_s = time.monotonic() + (LIFE_TIMEOUT_S if kill_after_s is None else kill_after_s)
    while True:
        left_s = kill_at_s - time.monotonic()
        if left_s <= 0:
            os.kill(pid, signal.SIGKILL)
            is_hung, left_s = kill_after_s is None, LIFE_TIMEOUT_S
            kill_at_s += LIFE_TIMEOUT_S
        if select.select([reading], [], [], left_s)[0]:
            part = os.read(reading, 1 << 20)
            if not part:
                break
            data += part
    whole_lines, _, _ = data.rpartition(b"\n")
    return [json.loads(line) for line in whole_lines.splitlines()], is_hung


def main() -> None:
    """Serves orders from standard input until it closes."""
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"a nursery forks: it must have one thread, has {len(threads)}"
    for line in sys.stdin:
        lived = _raise_one(Order(**json.loads(line)))
        print(json.dumps(asdict(lived)), flush=True)


if __name__ == "__main__":
    main()
