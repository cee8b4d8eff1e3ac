"""The process that stands between a worker and one program: when it ends, nothing of the program is left.

Started as `python -I -S guardian.py ORDER` with the program's environment and directory; ORDER is JSON. It
adopts whatever the program orphans (child subreaper), so that no daemon leaves its tree. A byte on stdin asks
it to stop; the end of stdin says that the worker is gone: then the scratch directory goes too.
Exit status: the program's, or 128 + signal; 125 if a limit could not be set (nothing ran), 126 or 127 if the
program could not be started, as shells do. Standard library only, no import of ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
NOT_CONFINED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
PASS_S = 0.01  # between two looks at the processes
GIVE_UP_S = 10.0  # a process that survives SIGKILL for so long hangs in the kernel


def main(order: dict[str, Any]) -> int:
    try:
        _confine(order["network"])
    except OSError as error:
        return _refuse(NOT_CONFINED, error)
    try:
        program = subprocess.Popen(
            order["argv"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _limit(order),  # one thread only: safe
        )
    except FileNotFoundError as error:
        return _refuse(NOT_FOUND, error)
    except PermissionError as error:
        return _refuse(NOT_EXECUTABLE, error)
    except (OSError, subprocess.SubprocessError) as error:
        return _refuse(NOT_CONFINED, error)
    tree = _Tree(program.pid)
    word = _wait(program.pid)
    if word is not None:
        tree.ask_to_end(order["grace_s"])
    tree.kill()
    if word == b"":
        shutil.rmtree(order["scratch"], ignore_errors=True)
    program.returncode = tree.code or 0  # reaped here: subprocess need not look for it
    return tree.code if tree.code is not None else NOT_CONFINED


def _wait(pid: int) -> bytes | None:
    """None when the program has ended, else what stdin said: a byte, or nothing at its end."""
    handle = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(0, select.POLLIN)
    ready = dict(poll.poll())
    os.close(handle)
    return None if handle in ready else os.read(0, 1)


class _Tree:
    """The program and everything that it started. `code` is the program's exit code once it has ended."""

    def __init__(self, pid: int) -> None:
        self._pid, self.code = pid, None  # type: int, int | None

    def ask_to_end(self, grace_s: float) -> None:
        """SIGTERM to all, then up to `grace_s` for them to end."""
        self._signal(signal.SIGTERM)
        self._until_gone(grace_s)

    def kill(self) -> None:
        """SIGKILL until nothing is left: what forks while we look is found by the next look."""
        self._until_gone(GIVE_UP_S, kill=True)

    def _until_gone(self, timeout_s: float, *, kill: bool = False) -> None:
        end_s = time.monotonic() + timeout_s
        while self._signal(signal.SIGKILL if kill else 0) and time.monotonic() < end_s:
            time.sleep(PASS_S)

    def _signal(self, number: int) -> int:
        """Sends a signal to every process of the tree; returns how many there are."""
        self._reap()
        pids = _descendants(os.getpid())
        for pid in pids:
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue
        return len(pids)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, frontier = [], [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _parent(process: Path) -> int | None:
    try:
        state = (process / "stat").read_bytes().rpartition(b")")[2].split()  # a name may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(state[1])


def _confine(network: str) -> None:
    """Raises: OSError if the kernel refuses."""
    _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if network != "open":
        try:
            _leave_network()
        except OSError:
            if network == "closed":
                raise
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # stdin is how we are asked to stop


def _leave_network() -> None:
    """A network of our own, with nothing in it; it takes a user namespace of our own for a plain user."""
    try:
        _call("unshare", CLONE_NEWNET)
    except OSError:
        user, group = os.getuid(), os.getgid()
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _limit(order: dict[str, Any]) -> None:
    """In the child, before the program: what it may use, and no signal ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for name, value in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))


def _refuse(code: int, error: Exception) -> int:
    print(f"guardian: not started: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
