"""The conductor's process: an HTTP service on loopback that owns sessions, independent of who asked for them.

`python -m megloom.compute.conductor.service --home DIR`. One service per home (a file lock); its address and
token lie in the home. SIGTERM stops every session and every process that it started. No torch in here.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import fcntl
import json
import logging
import os
import secrets
import signal
import socket
from pathlib import Path

import uvicorn

from megloom.compute.cluster.http import QuietServer
from megloom.compute.cluster.local import LocalCluster
from megloom.compute.conductor.client import process_start
from megloom.compute.conductor.http_api import build_app
from megloom.compute.conductor.sessions import SessionTable

log = logging.getLogger(__name__)
GRACE_S = 2  # for answers in flight when the service stops


async def serve(home: Path) -> None:
    """Serves until SIGTERM or SIGINT."""
    token = secrets.token_hex(32)
    epoch = _next_epoch(home)
    cluster = LocalCluster(home / "logs")
    table = SessionTable(home=home, cluster=cluster, epoch=epoch, wall_time=_wall_time)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        server = QuietServer(
            uvicorn.Config(
                build_app(table, token=token, epoch=epoch),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        loop = asyncio.get_running_loop()

        def stop() -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        warm = loop.create_task(
            cluster.boot(), name="cluster:boot"
        )  # imports while the first client connects
        _publish(home, token=token, epoch=epoch, port=listener.getsockname()[1])
        try:
            await server.serve(sockets=[listener])
        finally:
            warm.cancel()
            await table.close()
            await cluster.close()
            (home / "service.json").unlink(missing_ok=True)


def _publish(home: Path, *, token: str, epoch: int, port: int) -> None:
    """Writes the token (0600), then the address: who sees the address finds the token."""
    descriptor = os.open(home / "service.token", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    draft = home / "service.json.draft"
    address = {
        "url": f"http://127.0.0.1:{port}",
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
        "epoch": epoch,
    }
    draft.write_text(json.dumps(address))
    draft.replace(home / "service.json")


def _next_epoch(home: Path) -> int:
    """Raises the fencing number: messages of an earlier service's sessions are told apart by it."""
    path = home / "epoch"
    epoch = int(path.read_text()) + 1 if path.exists() else 1
    draft = home / "epoch.draft"
    draft.write_text(str(epoch))
    draft.replace(path)
    return epoch


def _wall_time() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def main() -> None:
    parser = argparse.ArgumentParser(description="Megloom's conductor service (started by: megloom up)")
    parser.add_argument("--home", type=Path, required=True, help="folder of the service's files")
    parser.add_argument("--detach", action="store_true", help="go on in a process of its own session")
    arguments = parser.parse_args()
    home = arguments.home.resolve()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if arguments.detach:
        if os.fork():
            os._exit(0)  # whoever started us waits for this exit only
        os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with (home / "service.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"another service runs in {home}")
        asyncio.run(serve(home))


if __name__ == "__main__":
    main()
