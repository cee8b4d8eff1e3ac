"""A real SGLang server on a CPU: started from an environment of its own, stopped with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megloom.compute.cluster.forkserver import die_with_parent
from megloom.compute.engines.sglang_launch import SglangArgs, free_port, sglang_command

STUBS = Path(__file__).parent / "stubs"
START_S = 600.0  # 40 s on a quiet machine, three times that on a busy one; imports from a cold disk the rest
STOP_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningServer:
    """Where the server listens and what it writes."""

    url: str
    token: str = field(repr=False)
    log: Path


@contextmanager
def running_server(
    *, python: str, model_dir: str, policy: str, version: int, log: Path
) -> Iterator[RunningServer]:
    """Starts SGLang with the interpreter `python`, waits until it is ready, ends it with its children.

    Raises: RuntimeError with the log's end if it does not become ready.
    """
    token = os.urandom(16).hex()
    args = SglangArgs(
        model_dir=model_dir,
        policy=policy,
        version=version,
        api_key=token,
        port=free_port(),
        device="cpu",
        decode_log_interval=1,  # the gauges that tests wait for are written at these steps only
    )
    # one thread: a second one is slower on these tiny matrices
    environment = {**os.environ, "PYTHONPATH": str(STUBS), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            sglang_command(args, python=python),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    server = RunningServer(url=f"http://{args.host}:{args.port}", token=token, log=log)
    try:
        _await_ready(process, server)
        yield server
    finally:
        _stop(process)


def _await_ready(process: subprocess.Popen[bytes], server: RunningServer) -> None:
    request = urllib.request.Request(
        f"{server.url}/ready", headers={"Authorization": f"Bearer {server.token}"}
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            ended = f"SGLang ended with {process.returncode} before it was ready"
            raise RuntimeError(f"{ended}:\n{_tail(server.log)}")
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"SGLang was not ready within {START_S:.0f} s:\n{_tail(server.log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group: the scheduler and the detokenizer are processes of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait(timeout=STOP_S)
