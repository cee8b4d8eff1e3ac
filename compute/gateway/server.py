"""The gateway's process: HTTP on loopback for agents and their programs, behind it the conductor's channel.

Started by the cluster with `serve(args)`; serves one conductor on a unix socket and ends with it. The port is
the kernel's choice and is published as a file once it is open.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from megloom.compute.cluster.http import OneWriteProtocol, QuietServer
from megloom.compute.cluster.rpc import Channel, serve_one
from megloom.compute.engines.client import HttpEngine
from megloom.compute.engines.protocol import EngineInfo
from megloom.compute.gateway.app import GatewayApp
from megloom.compute.gateway.protocol import Placement, StreamingEngine
from megloom.compute.gateway.remote import RemoteDesk, gateway_calls

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
BACKLOG = 1024  # programs of a whole step may connect at once
KEEP_ALIVE_S = 600  # above any client's: a connection closed under a request looks like a lost answer
ENGINE_KEEP_ALIVE_S = 300.0  # below the local engine's ten minutes
GRACE_S = 2  # for answers in flight at shutdown


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayArgs:
    """`socket` is where the conductor connects; `address_file` gets the HTTP address."""

    socket: str
    address_file: str


class EngineTable:
    """One client per engine address. An engine that comes back has another address; old clients stay idle."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str], HttpEngine] = {}

    def __call__(self, placement: Placement) -> StreamingEngine:
        """The engine that the placement names."""
        address = (placement.url, placement.token)
        if address not in self._engines:
            self._engines[address] = _engine_at(placement)
        return self._engines[address]

    async def close(self) -> None:
        """Closes every client."""
        for engine in self._engines.values():
            await engine.close()


def _engine_at(placement: Placement) -> HttpEngine:
    url, token = placement.url, placement.token
    if placement.vocab_size is None or placement.context_length is None:
        return HttpEngine(url, token, keep_alive_s=ENGINE_KEEP_ALIVE_S)
    limits = EngineInfo(
        policy=placement.policy,
        version=0,
        vocab_size=placement.vocab_size,
        context_length=placement.context_length,
        incarnation=placement.engine,
        paused=False,
    )
    return HttpEngine(url, token, assumed=limits)  # the client's own keep-alive is below SGLang's 5 s


def serve(values: dict[str, Any]) -> None:
    """Entry of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(_serve(GatewayArgs(**values)))


async def _serve(args: GatewayArgs) -> None:
    """Serves until the conductor closes its channel, or SIGTERM."""
    engines = EngineTable()
    with socket.create_server((HOST, 0), backlog=BACKLOG) as listener:
        channels: list[Callable[[], Channel]] = []
        desk = RemoteDesk(lambda: channels[0]())
        port = listener.getsockname()[1]
        gateway = GatewayApp(desk=desk, engines=engines, base_url=f"http://{HOST}:{port}")
        server = http_server(gateway)

        def calls(channel: Callable[[], Channel]) -> Any:
            channels.append(channel)
            return gateway_calls(lambda: gateway)

        answering = asyncio.create_task(server.serve(sockets=[listener]), name="gateway:http")
        _publish_address(Path(args.address_file), port)
        log.info("listening port=%d pid=%d", port, os.getpid())
        talking = asyncio.create_task(serve_one(Path(args.socket), calls=calls), name="gateway:channel")
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, talking.cancel)
        try:
            await asyncio.wait([talking, answering], return_when=asyncio.FIRST_COMPLETED)
        finally:
            talking.cancel()
            server.should_exit = True
            await asyncio.wait([talking, answering])
            await engines.close()
        for task in (talking, answering):
            if not task.cancelled():
                task.result()  # what broke is the process's end, with its traceback in the log


def http_server(gateway: GatewayApp) -> QuietServer:
    """The server of a gateway's routes, to be given the sockets that it listens on."""
    return QuietServer(
        uvicorn.Config(
            gateway.app,
            http=OneWriteProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )


def _publish_address(path: Path, port: int) -> None:
    """Writes the address whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"host": HOST, "port": port, "pid": os.getpid()}))
    partial.replace(path)
