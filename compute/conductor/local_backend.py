"""A session's cells as real processes of the local cluster. Implements `Backend`.

Edge of the conductor: paths, sockets and tokens live here; the token protects the engines' HTTP routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megloom.compute.cluster.local import LocalCluster
from megloom.compute.cluster.protocol import ClusterError, ProcessSpec
from megloom.compute.conductor.backend import CellExit
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.engines.client import HttpEngine
from megloom.compute.engines.protocol import Engine, EngineInfo
from megloom.compute.engines.sglang_launch import SglangArgs, free_port, read_limits
from megloom.compute.gateway.protocol import CallDesk, Placement
from megloom.compute.gateway.remote import RemoteGateway, connect_gateway
from megloom.compute.rollout.client import WorkerClient, connect_worker
from megloom.compute.rollout.protocol import EpisodeEvents
from megloom.compute.trainers.client import connect_trainer
from megloom.compute.trainers.protocol import Trainer, TrainerPlan
from megloom.compute.trainers.ranks import RankedTrainer
from megloom.compute.trainers.suspended import StoreShelf
from megloom.compute.workload import Trainer as TrainerKnobs

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 120.0  # a forked child listens within a second; a machine's first engine compiles kernels
SGLANG_START_S = 600.0  # imports from a cold disk, weights, and on a GPU its graphs
KEEP_ALIVE_S = 300.0  # our engines keep connections for ten minutes; a new one costs as much as a call
STOP_GRACE_S = 2.0
_RANK = "@"  # between a trainer's name and the number of a further rank


class LocalBackend:
    """One session's cells. Process names are `<run>:<cell>`; sockets lie in a private short-named folder."""

    def __init__(self, *, config: SessionConfig, home: Path, cluster: LocalCluster) -> None:
        self.exits: asyncio.Queue[CellExit] = asyncio.Queue()  # bounded by the number of cells
        self._config, self._home, self._cluster = config, home, cluster
        self.shelf = StoreShelf(home / "runs" / config.run / "suspended", run=config.run)
        self._prefix = f"{config.run}:"
        self._sockets = Path(tempfile.mkdtemp(prefix="megloom-"))  # unix socket paths are at most 107 bytes
        self._token = secrets.token_hex(16)
        self._clients: dict[str, Any] = {}
        self._lives: dict[str, int] = {}
        self._life_of: dict[int, int] = {}  # pid → which life of its cell it is
        self._stopping: set[int] = set()  # pids whose end was asked for
        self._vocab_sizes: dict[str, int] = {}  # by policy, where engines do not report it
        self._watch = asyncio.get_running_loop().create_task(self._forward_exits(), name="backend:exits")

    async def start_worker(self, name: str, events: EpisodeEvents) -> WorkerClient:
        await self._require_sglang()  # a session's first cell: the lack is told before anything runs
        socket = self._socket(name)
        args = {
            "socket": str(socket),
            "workload": self._config.workload,
            "data_dir": str(self._home / "data"),
            "import_paths": list(self._config.import_paths),
        }
        await self._start(name, "megloom.compute.rollout.worker:serve", args)
        client = await self._connected(
            name, connect_worker(name, socket, events, timeout_s=CONNECT_TIMEOUT_S)
        )
        self._clients[name] = client
        return client

    async def start_trainer(self, name: str, plan: TrainerPlan) -> Trainer:
        """One process, or one for each rank; those meet by a file."""
        num_ranks = TrainerKnobs.parse(plan.trainer).ranks
        names = [name, *(f"{name}{_RANK}{rank}" for rank in range(1, num_ranks))]
        args: dict[str, Any] = {"plan": asdict(plan), "cache_dir": str(self._home / "models")}
        self._count_life(name)
        if num_ranks > 1:
            args |= {"world_size": num_ranks, "rendezvous": str(self._socket(f"{name}.rendezvous"))}
        sockets = [self._socket(one) for one in names]
        for rank, (one, socket) in enumerate(zip(names, sockets, strict=True)):
            own = {"socket": str(socket), "rank": rank}
            await self._fork(one, "megloom.compute.trainers.server:serve", args | own)
        clients = await asyncio.gather(
            *(
                self._connected(one, connect_trainer(plan.policy, socket, timeout_s=CONNECT_TIMEOUT_S))
                for one, socket in zip(names, sockets, strict=True)
            )
        )
        trainer: Trainer = clients[0] if num_ranks == 1 else RankedTrainer(plan.policy, clients)
        self._clients[name] = trainer
        return trainer

    async def start_engine(self, name: str, *, policy: str, uri: str, version: int) -> Engine:
        start = self._start_sglang if self._config.cells.engine == "sglang" else self._start_local
        engine = self._clients[name] = await start(name, policy, uri, version)
        return engine

    async def _start_local(self, name: str, policy: str, uri: str, version: int) -> HttpEngine:
        address_file = self._socket(f"{name}.address")
        args = {
            "model_dir": uri,
            "policy": policy,
            "version": version,
            "token": self._token,
            "address_file": str(address_file),
            "incarnation": f"{name}.{self._lives.get(name, 0)}",
            "max_slots": self._config.cells.engine_slots,
            "device": self._config.cells.device,
            "threads": self._config.cells.threads,
        }
        await self._start(name, "megloom.compute.engines.server:serve_values", args)
        address = await self._connected(name, _read_address(address_file))
        engine = HttpEngine(
            f"http://{address['host']}:{address['port']}", self._token, keep_alive_s=KEEP_ALIVE_S
        )
        await engine.info()
        return engine

    async def _start_sglang(self, name: str, policy: str, uri: str, version: int) -> HttpEngine:
        """Real SGLang as a process of the session. Raises: ClusterError, EngineError."""
        await self._require_sglang()
        cells = self._config.cells
        try:
            vocab_size, context_length = read_limits(uri)
        except (OSError, ValueError) as error:
            raise ClusterError(f"{name}: {error}") from None
        args = SglangArgs(
            model_dir=uri,
            policy=policy,
            version=version,
            api_key=self._token,
            port=free_port(),
            device="cuda" if cells.device == "cuda" else "cpu",
            context_length=context_length,
            max_running_requests=cells.engine_slots,
        )
        values = {"args": asdict(args), "python": self._engine_python, "threads": cells.threads}
        await self._start(name, "megloom.compute.engines.sglang_launch:become_sglang", values)
        limits = EngineInfo(
            policy=policy,
            version=version,
            vocab_size=vocab_size,
            context_length=context_length,
            incarnation=f"{name}.{self.incarnation(name)}",
            paused=False,
        )
        engine = HttpEngine(f"http://{args.host}:{args.port}", self._token, assumed=limits)
        try:
            await self._connected(name, _until_ready(engine))
            await engine.info()
        except BaseException:
            await engine.close()
            raise
        self._vocab_sizes[policy] = vocab_size
        return engine

    @property
    def _engine_python(self) -> str:
        return self._config.cells.engine_python or sys.executable

    async def _require_sglang(self) -> None:
        """Raises: ClusterError if the session's engines are SGLang and the interpreter has none."""
        if self._config.cells.engine != "sglang":
            return
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
        try:
            looking = await asyncio.create_subprocess_exec(self._engine_python, "-c", code)
            found = await looking.wait() == 0
        except OSError as error:
            raise ClusterError(f"cells.engine_python {self._engine_python}: {error.strerror}") from None
        if not found:
            raise ClusterError(
                f"cells.engine 'sglang': {self._engine_python} has no sglang; install megloom[sglang] there, "
                "or name an interpreter that has it in cells.engine_python (docs/sglang.md)"
            )

    async def start_gateway(self, name: str, desk: CallDesk) -> RemoteGateway:
        socket = self._socket(name)
        args = {"socket": str(socket), "address_file": str(self._socket(f"{name}.address"))}
        await self._start(name, "megloom.compute.gateway.server:serve", args)
        connecting = connect_gateway(
            name, socket, desk, timeout_s=CONNECT_TIMEOUT_S, complete=self._with_vocabulary
        )
        gateway = await self._connected(name, connecting)
        self._clients[name] = gateway
        return gateway

    def _with_vocabulary(self, placement: Placement) -> Placement:
        return replace(placement, vocab_size=self._vocab_sizes.get(placement.policy))

    def new_token(self) -> str:
        return secrets.token_hex(24)

    def incarnation(self, name: str) -> int:
        return self._lives.get(name, 0)

    async def stop(self, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is not None:
            await client.close()
        full = self._prefix + name
        ours = [full, *self._cluster.names(f"{full}{_RANK}")]
        running = {one: pid for one in ours if (pid := self._cluster.pid(one)) is not None}
        self._stopping.update(running.values())
        await asyncio.gather(*(self._cluster.kill(one, grace_s=STOP_GRACE_S) for one in running))

    async def close(self) -> None:
        """Ends every cell of the session."""
        self._watch.cancel()
        names = [name.removeprefix(self._prefix) for name in self._cluster.names(self._prefix)]
        await asyncio.gather(*(self.stop(name) for name in {*names, *self._clients}))
        await self.shelf.close()
        self._cluster.unwatch(self._prefix)
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def _start(self, name: str, entry: str, args: dict[str, Any]) -> None:
        self._count_life(name)
        await self._fork(name, entry, args)

    def _count_life(self, name: str) -> None:
        self._lives[name] = self._lives.get(name, 0) + 1

    async def _fork(self, name: str, entry: str, args: dict[str, Any]) -> None:
        pid = await self._cluster.start(ProcessSpec(name=self._prefix + name, entry=entry, args=args))
        self._life_of[pid] = self.incarnation(_cell_of(name))

    async def _connected(self, name: str, connecting: Any) -> Any:
        """The result of `connecting`, unless the process ends first.

        Raises: ClusterError with the process's last log lines.
        """
        task = asyncio.ensure_future(connecting)
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=0.25)
                if done:
                    return task.result()
                if self._cluster.pid(self._prefix + name) is None:
                    tail = self._without_token(self._cluster.log_tail(self._prefix + name))
                    raise ClusterError(f"{name} ended at its start; its log ends:\n{tail}")
        except TimeoutError as error:
            tail = self._without_token(self._cluster.log_tail(self._prefix + name))
            raise ClusterError(f"{name}: {error}; its log ends:\n{tail}") from None
        finally:
            task.cancel()

    async def _forward_exits(self) -> None:
        """Consumes the cluster's exits. Waits for one. Woken by it; asked-for exits are not reported."""
        queue = self._cluster.watch(self._prefix)
        while True:
            exit_ = await queue.get()
            incarnation = self._life_of.pop(exit_.pid, 0)
            if exit_.pid in self._stopping:
                self._stopping.discard(exit_.pid)
                continue
            name = _cell_of(exit_.name.removeprefix(self._prefix))
            tail = self._without_token(exit_.log_tail)[-1000:].strip()
            cause = f"exit code {exit_.code}; log ends: {tail}"
            self.exits.put_nowait(CellExit(name=name, incarnation=incarnation, cause=cause))

    def _without_token(self, text: str) -> str:
        """SGLang writes its arguments into its log, and causes are shown to whoever reads a status."""
        return text.replace(self._token, "[token]")

    def _socket(self, name: str) -> Path:
        """A path of this life of the cell only: nobody reads what an earlier life left."""
        life = self.incarnation(_cell_of(name.removesuffix(".address").removesuffix(".rendezvous")))
        return self._sockets / f"{name.replace('/', '.')}.{life}"


def _cell_of(name: str) -> str:
    """The cell that a process belongs to: itself, or that of all ranks."""
    return name.partition(_RANK)[0]


async def _until_ready(engine: HttpEngine) -> None:
    """Raises: TimeoutError naming the address."""
    try:
        async with asyncio.timeout(SGLANG_START_S):
            while True:
                if await engine.ready():
                    return
                await asyncio.sleep(0.25)
    except TimeoutError:
        raise TimeoutError(f"SGLang at {engine.url} was not ready after {SGLANG_START_S:g} s") from None


async def _read_address(path: Path) -> dict[str, Any]:
    """The address that an engine publishes once it listens.

    Raises: TimeoutError naming the file.
    """
    deadline = asyncio.get_running_loop().time() + CONNECT_TIMEOUT_S
    while (text := _read_if_there(path)) is None:
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"no address in {path} after {CONNECT_TIMEOUT_S:.0f} s")
        await asyncio.sleep(0.02)
    return dict(json.loads(text))


def _read_if_there(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
