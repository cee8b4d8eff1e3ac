"""The trainer's process: a `Replica` behind a unix socket. Importing this module loads torch and the
model classes, so that a fork server can have them ready.

Torch works inside the handlers, which never await: one verb at a time, in order of arrival. The process ends
when its one client closes the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megloom.compute.cluster.rpc import CallHandler, serve_one
from megloom.compute.trainers.process_group import init_ranks
from megloom.compute.trainers.protocol import TrainerPlan
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.wire import pack_forward, pack_report, unpack_micro_batch


def serve(args: dict[str, Any]) -> None:
    """Serves one client at `args["socket"]`; a process entry, returns when the client is gone.

    `plan` is `asdict(TrainerPlan)`; `cache_dir` (optional) is where converted models are kept. A replica of
    several ranks is as many such processes, with `rank`, `world_size` and `rendezvous` (a path that no file
    has yet) besides; they wait for each other before they listen.
    """
    plan = TrainerPlan(**args["plan"])
    torch.set_num_threads(plan.threads)
    init_ranks(args)
    cache_dir = Path(args["cache_dir"]) if args.get("cache_dir") else None
    replica = Replica(plan, cache_dir=cache_dir)
    handlers = _handlers(replica)
    asyncio.run(serve_one(Path(args["socket"]), calls=lambda _: handlers))


def _handlers(replica: Replica) -> Mapping[str, CallHandler]:
    verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
        "create": lambda message: pack_report(replica.create(**message)),
        "load": lambda message: replica.load(**message),
        "forward": lambda message: pack_forward(
            replica.forward(unpack_micro_batch(message["batch"]), message["wants"])
        ),
        "forward_backward": lambda message: pack_report(
            replica.forward_backward(unpack_micro_batch(message))
        ),
        "export_gradients": lambda message: pack_report(replica.export_gradients(**message)),
        "add_gradients": lambda message: replica.add_gradients(**message),
        "optim_step": lambda message: pack_report(replica.optim_step(**message)),
        "publish": lambda message: pack_report(replica.publish(**message)),
        "save": lambda message: replica.save(**message),
    }
    return {name: _handler(verb) for name, verb in verbs.items()}


def _handler(verb: Callable[[dict[str, Any]], Any]) -> CallHandler:
    async def handle(message: dict[str, Any]) -> Any:
        return verb(message)

    return handle
