"""The local cluster: one machine, one fork server, no extra dependency. Implements `Cluster`.

One cluster serves every session of a service; a session watches the processes under its own name prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from megloom.compute.cluster.protocol import ClusterError, Exit, ProcessSpec

log = logging.getLogger(__name__)
BOOT_TIMEOUT_S = 120.0  # importing torch and transformers took 8 s on a busy laptop
START_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 4000
PRELOAD = (
    "megloom.compute.engines.server",
    "megloom.compute.trainers.server",
    "megloom.compute.trainers.deepspeed_preload",  # nothing, where deepspeed is not installed
    "megloom.compute.rollout.worker",
    "megloom.compute.gateway.server",
)


class LocalCluster:
    """Starts processes through the fork server and reports their ends to whoever watches their prefix."""

    def __init__(self, log_dir: Path, *, preload: tuple[str, ...] = PRELOAD) -> None:
        self._watchers: dict[str, asyncio.Queue[Exit]] = {}
        self._log_dir, self._preload = log_dir, preload
        self._pids: dict[str, int] = {}
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._gone: dict[str, asyncio.Event] = {}
        self._server: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._boot = asyncio.Lock()

    async def boot(self) -> None:
        """Starts the fork server; returns when its imports are done. Later calls return at once.

        Raises: ClusterError with the end of its log, if it does not come up.
        """
        async with self._boot:
            if self._server is None:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                await self._start_server()
        try:
            async with asyncio.timeout(BOOT_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError:
            raise ClusterError(f"fork server not ready after {BOOT_TIMEOUT_S:.0f} s") from None
        if self._reader is None or self._reader.done():
            raise ClusterError(f"fork server ended at its start:\n{self.log_tail('forkserver')}")

    async def start(self, spec: ProcessSpec) -> int:
        await self.boot()
        if spec.name in self._pids:
            raise ClusterError(f"process {spec.name} runs already, pid={self._pids[spec.name]}")
        self._starting[spec.name] = asyncio.get_running_loop().create_future()
        self._gone[spec.name] = asyncio.Event()
        self._send(
            {
                "start": spec.name,
                "entry": spec.entry,
                "args": spec.args,
                "env": dict(spec.env),
                "log": str(self._log_path(spec.name)),
            }
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await self._starting[spec.name]
        except TimeoutError:
            raise ClusterError(f"process {spec.name}: not forked after {START_TIMEOUT_S:.0f} s") from None
        finally:
            self._starting.pop(spec.name, None)

    async def kill(self, name: str, *, grace_s: float = 2.0) -> None:
        pid, gone = self._pids.get(name), self._gone.get(name)
        if pid is None or gone is None:
            return
        self._send({"kill": pid, "signal": int(signal.SIGTERM)})
        try:
            async with asyncio.timeout(grace_s):
                await gone.wait()
        except TimeoutError:
            self._send({"kill": pid, "signal": int(signal.SIGKILL)})
            await gone.wait()

    async def close(self) -> None:
        """Kills every process: the fork server does it when its input ends."""
        if self._server is None:
            return
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            async with asyncio.timeout(5.0):
                await self._server.wait()
        except TimeoutError:
            self._server.kill()
            await self._server.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    def watch(self, prefix: str) -> asyncio.Queue[Exit]:
        """The exits, from now on, of processes whose name starts with `prefix`; bounded by their number."""
        return self._watchers.setdefault(prefix, asyncio.Queue())

    def unwatch(self, prefix: str) -> None:
        self._watchers.pop(prefix, None)

    def names(self, prefix: str) -> list[str]:
        """The processes under a prefix that are running."""
        return [name for name in self._pids if name.startswith(prefix)]

    def pid(self, name: str) -> int | None:
        return self._pids.get(name)

    async def _start_server(self) -> None:
        log_file = os.open(self._log_path("forkserver"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        env = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env.setdefault("OMP_NUM_THREADS", "1")  # two OpenMP threads on two busy cores are slower than one
        try:
            self._server = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "megloom.compute.cluster.forkserver",
                *self._preload,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                env=env,
                start_new_session=True,
                limit=1 << 24,
            )
        finally:
            os.close(log_file)
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="cluster:forkserver")

    async def _read(self) -> None:
        """Consumes the fork server's lines. Waits for its output. Woken by starts and exits of processes."""
        assert self._server is not None and self._server.stdout is not None
        try:
            async for line in self._server.stdout:
                self._handle(json.loads(line))
        finally:
            self._ready.set()
            for name, pid in list(self._pids.items()):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # children of a child do not die with the fork server
                self._end(name, pid, -int(signal.SIGKILL))
            for future in self._starting.values():
                if not future.done():
                    future.set_exception(ClusterError("the fork server ended"))

    def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready.set()
        elif "started" in message:
            name = message["started"]
            self._pids[name] = message["pid"]
            future = self._starting.get(name)
            if future is not None and not future.done():
                future.set_result(message["pid"])
        else:
            self._end(message["exited"], message["pid"], message["code"])

    def _end(self, name: str, pid: int, code: int) -> None:
        if self._pids.get(name) != pid:
            return
        del self._pids[name]
        self._gone[name].set()
        for prefix, queue in self._watchers.items():
            if name.startswith(prefix):
                queue.put_nowait(Exit(name=name, pid=pid, code=code, log_tail=self.log_tail(name)))

    def _send(self, message: dict[str, Any]) -> None:
        if self._server is None or self._server.stdin is None or self._server.returncode is not None:
            raise ClusterError("the fork server is not running")
        self._server.stdin.write(json.dumps(message).encode() + b"\n")

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{name.replace('/', '-').replace(':', '-')}.log"

    def log_tail(self, name: str) -> str:
        """The end of a process's output; empty if it wrote none."""
        path = self._log_path(name)
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
