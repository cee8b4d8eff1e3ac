"""Runs a finished program for an episode: its own directory and environment, a deadline, nothing left behind.

The program is not changed and needs to know nothing of us: it finds the episode's endpoint in the variables
that clients of the two common APIs read. `guardian.py` holds its processes, `workspace.py` its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import fnmatch
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megloom.compute.rollout.output import BoundedOutput
from megloom.compute.rollout.protocol import Endpoint
from megloom.compute.rollout.workspace import Workspace, create_workspace
from megloom.compute.workload import AgentEndpoint, HarnessResult, ProgramLimits

T = TypeVar("T")
GUARDIAN = Path(__file__).with_name("guardian.py")
LOOK_S = 0.2  # between two looks at the disk
GUARDIAN_S = 15.0  # beyond the grace: the guardian needs 10 s at worst
READ_END_S = 2.0  # from a guardian's end to that of its output
READ_BYTES = 1 << 16


class Programs:
    """`team.run` and `team.endpoint` of one episode attempt. `left_s` tells the time that programs have."""

    def __init__(
        self,
        *,
        episode_id: str,
        agents: Collection[str],
        endpoint: Endpoint | None,
        left_s: Callable[[], float],
        slots: asyncio.Semaphore,
    ) -> None:
        self._episode_id, self._agents, self._endpoint = episode_id, agents, endpoint
        self._left_s, self._slots = left_s, slots
        self._stop = asyncio.Event()
        self.num_running = 0

    @property
    def was_stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends the programs that run, as at their deadline: what they left can still be scored."""
        self._stop.set()

    def endpoint(self, agent: str) -> AgentEndpoint:
        """Where a client in this process, or a program, calls the agent.

        Raises: LookupError if there is no such agent; RuntimeError if the workload has no gateway.
        """
        if agent not in self._agents:
            near = difflib.get_close_matches(agent, self._agents, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise LookupError(f"no agent {agent!r}{hint} (agents: {', '.join(sorted(self._agents))})")
        if self._endpoint is None:
            raise RuntimeError(
                f"episode {self._episode_id} has no endpoint: declare the workload with uses_gateway=True"
            )
        return AgentEndpoint(
            openai_url=self._endpoint.openai_url,
            anthropic_url=self._endpoint.anthropic_url,
            token=self._endpoint.token,
            model=agent,
        )

    async def run(
        self,
        program: Sequence[str],
        *,
        agent: str,
        files: Mapping[str, str | bytes] | None = None,
        env: Mapping[str, str] | None = None,
        keep: Sequence[str] = ("*",),
        timeout_s: float | None = None,
        limits: ProgramLimits | None = None,
    ) -> HarnessResult:
        """Runs a program that calls `agent`; returns how it ended and what it left.

        Waits for a place among the worker's programs. It is stopped after `timeout_s`, and in any case early
        enough that its files can be scored. Raises: TimeoutError if there is no time left to start it;
        FileNotFoundError if there is no such program; WorkspaceError for a path that leads out.
        """
        endpoint = self.endpoint(agent)
        async with self._slots:
            left_s = self._left_s()
            if left_s <= 0:
                raise TimeoutError(f"episode {self._episode_id}: no time left to run {program[0]!r}")
            self.num_running += 1
            try:
                result = await run_alone(
                    program,
                    files=files or {},
                    env={**endpoint_variables(endpoint), **(env or {})},
                    keep=keep,
                    timeout_s=min(left_s, timeout_s if timeout_s is not None else left_s),
                    limits=limits or ProgramLimits(),
                    stop=self._stop,
                )
            finally:
                self.num_running -= 1
        return _without(result, endpoint.token)


def endpoint_variables(endpoint: AgentEndpoint) -> dict[str, str]:
    """The environment in which clients of both APIs find the endpoint, and its agent as the model."""
    return {
        "OPENAI_BASE_URL": endpoint.openai_url,
        "OPENAI_API_KEY": endpoint.token,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_url,
        "ANTHROPIC_API_KEY": endpoint.token,
        "ANTHROPIC_MODEL": endpoint.model,
    }


async def run_alone(
    program: Sequence[str],
    *,
    files: Mapping[str, str | bytes],
    timeout_s: float,
    limits: ProgramLimits,
    env: Mapping[str, str] | None = None,
    keep: Sequence[str] = ("*",),
    stop: asyncio.Event | None = None,
) -> HarnessResult:
    """Runs a program in a new directory with `files` and nothing else; graders use it too.

    It inherits no variable but PATH. `keep` are patterns of the files to copy out. Raises: FileNotFoundError
    if there is no such program; WorkspaceError for a path that leads out.
    """
    workspace = await _new_workspace(files)
    try:
        variables = _variables(workspace, env or {})
        if "/" not in program[0] and shutil.which(program[0], path=variables["PATH"]) is None:
            raise FileNotFoundError(f"program {program[0]!r} is not on the path {variables['PATH']}")
        run = _Run(program, workspace, variables, limits)
        ended = await run.until_end(timeout_s, stop or asyncio.Event())
        collected = await asyncio.to_thread(
            workspace.collect,
            max_bytes=limits.collected_bytes,
            max_files=limits.collected_files,
            keep=lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in keep),
        )
        return HarnessResult(
            exit_code=ended.exit_code,
            timed_out=ended.timed_out,
            over_disk=ended.over_disk,
            output=ended.output,
            workspace=collected.files,
            left_out=collected.left_out,
        )
    finally:
        await _to_the_end(asyncio.to_thread(workspace.remove))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ended:
    exit_code: int
    timed_out: bool
    over_disk: bool
    output: str


class _Run:
    """One start of a program, under its guardian."""

    def __init__(
        self, program: Sequence[str], workspace: Workspace, env: Mapping[str, str], limits: ProgramLimits
    ) -> None:
        self._workspace, self._env, self._limits = workspace, env, limits
        self._order = {
            "argv": list(program),
            "scratch": str(workspace.root),
            "grace_s": limits.grace_s,
            "network": limits.network,
            "limits": {
                "RLIMIT_CORE": 0,
                "RLIMIT_FSIZE": limits.file_bytes,
                **({"RLIMIT_AS": limits.memory_bytes} if limits.memory_bytes is not None else {}),
                **({"RLIMIT_CPU": limits.cpu_s} if limits.cpu_s is not None else {}),
            },
        }
        self._output = BoundedOutput(limits.output_bytes)

    async def until_end(self, timeout_s: float, stop: asyncio.Event) -> _Ended:
        """Waits for the first of: its end, the deadline, a full disk, `stop`. Then nothing of it runs."""
        guardian = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(GUARDIAN), json.dumps(self._order)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._workspace.work,
            env=self._env,
            start_new_session=True,  # a signal to the worker's group is not for it: stdin tells it
        )
        exited = asyncio.create_task(_exited(guardian.pid))
        reading = asyncio.create_task(self._read(guardian))
        full = asyncio.create_task(self._fill())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait(
                {exited, full, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            over_disk = full.done()
            timed_out = not exited.done() and not over_disk
        finally:
            full.cancel()
            stopped.cancel()
            await _to_the_end(self._end(guardian, exited, reading))
        assert guardian.returncode is not None
        return _Ended(
            exit_code=guardian.returncode,
            timed_out=timed_out,
            over_disk=over_disk,
            output=self._output.text(),
        )

    async def _read(self, guardian: asyncio.subprocess.Process) -> None:
        """Consumes the program's output until nothing can write any more: the guardian holds it open."""
        assert guardian.stdout is not None
        while piece := await guardian.stdout.read(READ_BYTES):
            self._output.add(piece)

    async def _fill(self) -> None:
        """Returns once the workspace takes more disk than it may."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            if await asyncio.to_thread(self._workspace.used_bytes, self._limits.disk_bytes) > (
                self._limits.disk_bytes
            ):
                return
            # Looking at many files takes long: not more than a tenth of the time goes into it.
            await asyncio.sleep(max(LOOK_S, 10 * (loop.time() - began_s)))

    async def _end(
        self,
        guardian: asyncio.subprocess.Process,
        exited: asyncio.Task[None],
        reading: asyncio.Task[None],
    ) -> None:
        assert guardian.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            guardian.stdin.write(b"s")
            await guardian.stdin.drain()
        done, _ = await asyncio.wait({exited}, timeout=self._limits.grace_s + GUARDIAN_S)
        if not done:
            guardian.kill()
            await exited
        guardian.stdin.close()
        done, _ = await asyncio.wait({reading}, timeout=READ_END_S)
        if not done:  # something still holds the output: the guardian did not end it
            await asyncio.to_thread(_sweep, self._workspace.root)
            await asyncio.wait({reading}, timeout=READ_END_S)
            reading.cancel()
        await guardian.wait()
        if guardian.returncode is not None and guardian.returncode < 0:
            await asyncio.to_thread(_sweep, self._workspace.root)


async def _exited(pid: int) -> None:
    """Returns when a process of ours has ended, whoever still holds its pipes."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def _new_workspace(files: Mapping[str, str | bytes]) -> Workspace:
    """A workspace for the caller to remove; none is left where the caller is cancelled meanwhile."""
    making = asyncio.ensure_future(asyncio.to_thread(create_workspace, files))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        workspace = await making
        workspace.remove()
        raise


def _variables(workspace: Workspace, env: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a program. Programs installed beside our Python come first on its path."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    own = {"PATH": path, "HOME": str(workspace.home), "TMPDIR": str(workspace.tmp), "LANG": "C.UTF-8"}
    return {**own, **env}


def _sweep(root: Path) -> None:
    """Kills what a killed guardian has left: processes whose environment names the workspace."""
    marker = str(root).encode()
    for _ in range(3):  # what forked while we looked is found by the next look
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours
                if marker in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


def _without(result: HarnessResult, secret: str) -> HarnessResult:
    """The result without the episode's token in its output."""
    if secret not in result.output:
        return result
    return replace(result, output=result.output.replace(secret, "***"))


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Finishes clean-up of bounded duration before a cancellation goes on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
