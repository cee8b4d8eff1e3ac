"""A small single-threaded server that forks worker processes from a parent with heavy imports done.

Reads JSON lines on stdin ({"start": name, "entry", "args", "env", "log"} | {"kill": pid, "signal": n}) and
writes JSON lines on stdout ({"ready"} | {"started": name, "pid"} | {"exited": name, "pid", "code"}).
End of stdin kills every child. Forking is safe because this process runs no thread, no parallel torch
operation and no event loop. Each child leads its own process group and dies with this process
(a parent-death signal follows the forking thread, so only the main thread forks).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_CHILDREN: dict[int, str] = {}


def main() -> None:
    """Serves until stdin ends. argv: the modules to import first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    die_with_parent(signal.SIGTERM)  # which, unlike SIGKILL, leaves us the time to end the children's groups
    for module in sys.argv[1:]:
        importlib.import_module(module)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _send({"ready": True})
    buffered = b""
    try:
        while True:
            readable, _, _ = select.select([0, wake_read], [], [])
            if wake_read in readable:
                os.read(wake_read, 4096)
                _reap()
            if 0 in readable:
                data = os.read(0, 1 << 20)
                if not data:
                    break
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    _handle(json.loads(line))
    finally:
        for pid in list(_CHILDREN):
            _signal_group(pid, signal.SIGKILL)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when the thread that started it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def _handle(command: dict[str, Any]) -> None:
    if "kill" in command:
        if command["kill"] in _CHILDREN:
            _signal_group(command["kill"], command["signal"])
        return
    pid = os.fork()
    if pid == 0:
        _become_child(command)
    _CHILDREN[pid] = command["start"]
    _send({"started": command["start"], "pid": pid})


def _become_child(command: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        die_with_parent()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 256)
        os.environ.update(command["env"])
        module, _, function = command["entry"].partition(":")
        getattr(importlib.import_module(module), function)(command["args"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # the process boundary: the log gets the traceback, the supervisor the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap() -> None:
    for pid in list(_CHILDREN):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            name = _CHILDREN.pop(pid)
            _signal_group(pid, signal.SIGKILL)  # whatever it started goes with it
            _send({"exited": name, "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _signal_group(pid: int, number: int) -> None:
    for send in (os.killpg, os.kill):  # a child that has not called setsid yet leads no group
        try:
            send(pid, number)
            return
        except ProcessLookupError:
            continue


def _send(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
