"""Starts the local torch engine: loads a model, binds a port, serves until SIGTERM.

`serve` is called in a freshly forked child of a process that has torch imported, or through
`python -m megloom.compute.engines.server`. The address is published as a file, since the port is usually
chosen by the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn

from megloom.compute.cluster.http import OneWriteProtocol, QuietServer
from megloom.compute.engines.batcher import Batcher
from megloom.compute.engines.checkpoint import ModelConfig, read_config, read_tensors, verify
from megloom.compute.engines.http_app import EngineApp, EngineIdentity
from megloom.compute.engines.model import Weights, pack_weights
from megloom.compute.engines.runners import choose_runner
from megloom.compute.engines.service import EngineService
from megloom.compute.engines.wire import Limits
from megloom.compute.state.staging import full_folder
from megloom.compute.state.weights import WeightsError, is_complete

TOKEN_VARIABLE = "MEGLOOM_ENGINE_TOKEN"  # the command line would show the token to every user of the host
_KEEP_ALIVE_S = 600  # far above any client's: a connection closed under a request looks like a dead engine
_GRACE_S = 2  # for answers in flight at shutdown


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArgs:
    """How to start an engine. `port` 0 lets the kernel choose; `context_length` None takes the model's."""

    model_dir: str
    policy: str
    version: int
    token: str = field(repr=False)
    address_file: str
    incarnation: str
    host: str = "127.0.0.1"
    port: int = 0
    max_slots: int = 128
    context_length: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    prefill_budget_tokens: int = 1024


def whole_folder(model_path: str) -> str:
    """The folder with the whole weights of a version that may be kept as a delta; any other folder as it is.

    Raises: ValueError if the version cannot be rebuilt.
    """
    if not is_complete(Path(model_path)):
        return model_path
    try:
        return str(full_folder(Path(model_path), verified=False))  # the digest is checked when it is read
    except WeightsError as error:
        raise ValueError(str(error)) from error


def build_app(args: EngineArgs) -> tuple[EngineService, EngineApp]:
    """Returns the service and its HTTP application, with the model loaded.

    Raises: ValueError, FileNotFoundError if the model cannot be served as asked.
    """
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    config = read_config(args.model_dir)  # a version that is kept as a delta has its own
    context_length = args.context_length or config.max_position_embeddings
    if context_length > config.max_position_embeddings:
        raise ValueError(
            f"context_length {context_length} exceeds the model's {config.max_position_embeddings} positions"
        )

    def read_weights(model_path: str, digest: str | None) -> Weights:
        model_path = whole_folder(model_path)
        new_config: ModelConfig = read_config(model_path)
        if new_config != config:
            raise ValueError(f"{model_path}: config {new_config} differs from the served {config}")
        verify(model_path, digest)
        return pack_weights(read_tensors(model_path, config, device=device, dtype=dtype), config)

    runner = choose_runner(config, read_weights(args.model_dir, None), device=device, dtype=dtype)
    batcher = Batcher(
        runner,
        version=args.version,
        max_slots=args.max_slots,
        prefill_budget_tokens=args.prefill_budget_tokens,
        max_steps=runner.max_steps,
    )
    service = EngineService(batcher, read_weights)
    service.model_path = args.model_dir
    limits = Limits(
        vocab_size=config.vocab_size, context_length=context_length, eos_token_ids=config.eos_token_ids
    )
    identity = EngineIdentity(
        policy=args.policy,
        incarnation=args.incarnation,
        model_type=config.architecture,
        max_slots=args.max_slots,
    )
    return service, EngineApp(service, limits, identity, args.token)


def _publish_address(path: Path, host: str, port: int) -> None:
    """Writes the address whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"host": host, "port": port, "pid": os.getpid()}))
    partial.replace(path)


async def _serve(args: EngineArgs, listener: socket.socket) -> None:
    service, engine_app = build_app(args)
    server = QuietServer(
        uvicorn.Config(
            engine_app.app,
            http=OneWriteProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    gc.collect()
    gc.freeze()  # a collection that looks through torch's objects takes as long as a hundred steps
    stepping = asyncio.create_task(service.run(), name="engine-steps")

    def shut_down() -> None:
        stepping.cancel()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, shut_down)
    stepping.add_done_callback(lambda _: shut_down())  # a failed step loop ends the server
    host, port = listener.getsockname()[:2]
    _publish_address(Path(args.address_file), host, port)
    await server.serve(sockets=[listener])
    stepping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stepping


def serve(args: EngineArgs) -> None:
    """Serves until SIGTERM or SIGINT; live requests are then answered with their partial output.

    Raises: ValueError, FileNotFoundError if the model cannot be served; whatever broke the step loop.
    """
    torch.set_num_threads(args.threads)
    with socket.create_server((args.host, args.port), backlog=2048) as listener:
        asyncio.run(_serve(args, listener))


def serve_values(values: dict[str, Any]) -> None:
    """`serve` for a forked process, whose arguments arrive as plain data."""
    serve(EngineArgs(**values))


def parse_args(argv: list[str] | None = None) -> EngineArgs:
    """Returns the arguments of the command line and the token of the environment; exits on a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m megloom.compute.engines.server",
        description=f"Local torch inference engine; the bearer token is read from ${TOKEN_VARIABLE}.",
    )
    for name in ("model-dir", "policy", "address-file", "incarnation"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-slots", type=int, default=128)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prefill-budget-tokens", type=int, default=1024)
    parsed = vars(parser.parse_args(argv))
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        parser.error(f"the environment variable {TOKEN_VARIABLE} is not set")
    return EngineArgs(token=token, **parsed)


if __name__ == "__main__":
    serve(parse_args())
