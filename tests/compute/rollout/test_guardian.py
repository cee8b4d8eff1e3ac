"""Nothing of a program outlives its run: groups, sessions, daemons, and what is left when a guardian dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.rollout.harness import GUARDIAN, run_alone
from megloom.compute.workload import HarnessResult, ProgramLimits

LIMITS = ProgramLimits(grace_s=0.3)
DAEMON = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.environ.clear()
        null = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(null, handle)
        pathlib.Path("daemon.tmp").write_text(str(os.getpid()))
        os.rename("daemon.tmp", "daemon")
        time.sleep(600)
    os._exit(0)
while not os.path.exists("daemon"):
    time.sleep(0.01)
"""


def run(
    source: str,
    *,
    timeout_s: float = 60.0,
    limits: ProgramLimits = LIMITS,
    env: Mapping[str, str] | None = None,
) -> HarnessResult:
    """Runs Python source as a program."""
    program = [sys.executable, "-I", "-S", "main.py"]
    files = {"main.py": source}
    return asyncio.run(run_alone(program, files=files, timeout_s=timeout_s, limits=limits, env=env))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != b"Z"


def test_a_program_that_ends_gives_its_exit_code_and_output() -> None:
    result = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (result.exit_code, result.timed_out, result.over_disk) == (3, False, False)
    assert sorted(result.output.split()) == ["err", "out"]


def test_a_daemon_in_a_session_of_its_own_is_gone_when_the_program_has_ended() -> None:
    result = run(DAEMON)
    pid = int(result.workspace["daemon"])
    assert result.exit_code == 0 and not is_alive(pid)


def stopped_once_ready(source: str, tmp_path: Path, limits: ProgramLimits) -> HarnessResult:
    """Runs a program that makes the directory `$READY` when it may be stopped, and stops it then."""

    async def body() -> HarnessResult:
        stop, ready = asyncio.Event(), tmp_path / "ready"
        program = [sys.executable, "-I", "-S", "main.py"]
        running = asyncio.create_task(
            run_alone(
                program,
                files={"main.py": source},
                timeout_s=600.0,
                limits=limits,
                env={"READY": str(ready)},
                stop=stop,
            )
        )
        while not ready.exists() and not running.done():  # noqa: ASYNC110  another process makes it
            await asyncio.sleep(0.01)
        stop.set()
        return await running

    return asyncio.run(body())


def test_a_program_and_its_daemon_are_killed_though_they_ignore_being_asked(tmp_path: Path) -> None:
    source = "import os\nready = os.environ['READY']\n" + DAEMON
    source += "print('waits', flush=True)\nos.mkdir(ready)\ntime.sleep(600)"
    result = stopped_once_ready(source, tmp_path, LIMITS)
    pid = int(result.workspace["daemon"])
    assert result.timed_out and result.exit_code == 128 + signal.SIGKILL
    assert result.output == "waits\n" and not is_alive(pid)


def test_a_program_that_is_asked_to_end_may_write_its_files(tmp_path: Path) -> None:
    source = """
import os, pathlib, signal, sys, time
def end(*_):
    pathlib.Path("last").write_text("words")
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
os.mkdir(os.environ["READY"])
time.sleep(600)
"""
    result = stopped_once_ready(source, tmp_path, ProgramLimits(grace_s=60.0))
    assert (result.timed_out, result.exit_code) == (True, 7)
    assert result.workspace["last"] == b"words"


def test_a_program_is_stopped_at_its_deadline() -> None:
    result = run("import time; time.sleep(600)", timeout_s=0.3)
    assert result.timed_out and result.exit_code == 128 + signal.SIGTERM


def test_forking_again_and_again_does_not_outrun_the_guardian(tmp_path: Path) -> None:
    source = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        os.setsid()
        while True:
            if os.fork():
                os._exit(0)
            time.sleep(0.02)
print(os.getsid(0), flush=True)
"""
    marker = str(tmp_path)
    program = [sys.executable, "-I", "-S", "main.py", marker]
    result = asyncio.run(run_alone(program, files={"main.py": source}, timeout_s=60.0, limits=LIMITS))
    assert result.exit_code == 0
    processes = [process for process in Path("/proc").iterdir() if process.name.isdigit()]
    assert [process for process in processes if marker in _command(process)] == []


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode()
    except OSError:
        return ""


def test_a_program_that_kills_its_guardian_is_killed_by_the_worker() -> None:
    source = """
import os, pathlib, signal, time
child = os.fork()
if child == 0:
    os.setsid()
    time.sleep(600)
pathlib.Path("child").write_text(str(child))
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""
    result = run(source)
    assert result.exit_code == -signal.SIGKILL
    assert not is_alive(int(result.workspace["child"]))


def test_a_worker_that_is_gone_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    pid_file = tmp_path / "pid"
    script = f"echo $$ > {pid_file}.tmp; mv {pid_file}.tmp {pid_file}; exec sleep 600"
    order = _order(["/bin/sh", "-c", script], scratch)
    guardian = subprocess.Popen([sys.executable, "-I", "-S", str(GUARDIAN), order], stdin=subprocess.PIPE)
    assert guardian.stdin is not None
    while not pid_file.exists():
        assert guardian.poll() is None
        os.sched_yield()
    guardian.stdin.close()
    assert guardian.wait(timeout=60) == 128 + signal.SIGTERM
    assert not is_alive(int(pid_file.read_text())) and not scratch.exists()


def _order(argv: list[str], scratch: Path, **changes: Any) -> str:
    order = {"argv": argv, "scratch": str(scratch), "grace_s": 0.2, "network": "open", "limits": {}}
    return json.dumps(order | changes)


def test_a_limit_that_cannot_be_set_keeps_the_program_from_starting(tmp_path: Path) -> None:
    order = _order(["/bin/touch", str(tmp_path / "ran")], tmp_path, limits={"RLIMIT_UNHEARD_OF": 1})
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(GUARDIAN), order], stdin=subprocess.PIPE, capture_output=True
    )
    assert done.returncode == 125 and b"not started" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_file_larger_than_the_limit_is_cut_off_by_the_kernel() -> None:
    source = "open('big', 'wb').write(b'x' * 100_000)"
    result = run(source, limits=ProgramLimits(file_bytes=10_000))
    assert result.exit_code != 0 and len(result.workspace["big"]) <= 10_000


def test_memory_beyond_the_limit_is_refused_to_the_program() -> None:
    result = run("x = bytearray(1 << 30)", limits=ProgramLimits(memory_bytes=256 << 20))
    assert result.exit_code == 1 and "MemoryError" in result.output


def test_a_disk_that_fills_ends_the_program() -> None:
    source = """
import time
for number in range(64):
    open(str(number), "wb").write(b"x" * 1_000_000)
time.sleep(600)
"""
    result = run(source, limits=ProgramLimits(disk_bytes=20_000_000, grace_s=0.1))
    assert result.over_disk and not result.timed_out


def test_a_hundred_megabytes_of_output_are_kept_by_their_ends() -> None:
    source = """
import sys
print("begin")
for _ in range(1600):
    sys.stdout.write("x" * 65_536)
print("end")
"""
    result = run(source, limits=ProgramLimits(output_bytes=1000))
    assert result.exit_code == 0 and len(result.output) < 1100
    assert result.output.startswith("begin\nxxx") and result.output.endswith("xxx" + "end\n")
    assert f"[... {1600 * 65536 + 10 - 1000} bytes left out ...]" in result.output


def test_a_program_inherits_no_variable_but_the_path() -> None:
    os.environ["CANARY_API_KEY"] = "canary"
    try:
        result = run("import json, os; print(json.dumps(dict(os.environ)))", env={"DECLARED": "yes"})
    finally:
        del os.environ["CANARY_API_KEY"]
    found = json.loads(result.output)
    assert set(found) - {"LC_CTYPE"} == {"PATH", "HOME", "TMPDIR", "LANG", "DECLARED"}
    assert not Path(found["HOME"]).exists(), "the scratch directory is removed with the run"


@pytest.mark.parametrize("network", ["open", "closed"])
def test_a_closed_network_reaches_nobody(network: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        result = run(source, limits=ProgramLimits(network=network))
    if "not started: " in result.output and network == "closed":
        pytest.skip(f"this kernel gives no network namespace: {result.output}")
    assert (result.exit_code == 0) == (network == "open")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="program 'no-such-agent' is not on the path"):
        asyncio.run(run_alone(["no-such-agent"], files={}, timeout_s=1.0, limits=LIMITS))
    result = asyncio.run(run_alone(["./main"], files={}, timeout_s=30.0, limits=LIMITS))
    assert result.exit_code == 127 and "main" in result.output


def test_a_cancelled_run_ends_its_program_before_it_goes_on(tmp_path: Path) -> None:
    source = "import os, time\nos.mkdir(os.environ['PIDS'] + str(os.getpid()))\ntime.sleep(600)"

    async def body() -> None:
        program = [sys.executable, "-I", "-S", "main.py"]
        env, files = {"PIDS": f"{tmp_path}/"}, {"main.py": source}
        running = asyncio.create_task(
            run_alone(program, files=files, timeout_s=600.0, limits=LIMITS, env=env)
        )
        while not list(tmp_path.iterdir()):  # noqa: ASYNC110  another process makes it
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(body())
    assert not is_alive(int(next(tmp_path.iterdir()).name))


def test_a_run_that_is_cancelled_while_its_directory_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def body() -> None:
        running = asyncio.create_task(run_alone(["/bin/true"], files={}, timeout_s=60.0, limits=LIMITS))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(body())
    assert list(tmp_path.iterdir()) == []
