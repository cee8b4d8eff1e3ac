"""A trainer in another process, as the conductor holds it. Implements `protocol.Trainer`; no torch here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megloom.compute.cluster.rpc import Channel, PeerGone, RemoteError, connect
from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    GradientSums,
    MicroBatch,
    Published,
    TrainerError,
    TrainerLost,
    UpdateReport,
)
from megloom.compute.trainers.wire import (
    pack_micro_batch,
    unpack_forward,
    unpack_gradient,
    unpack_published,
    unpack_sums,
    unpack_update,
)

_TRACEBACK_LINES = 6  # the raise and its callers; the whole traceback is in the process's own log


class TrainerClient:
    """Calls fail with TrainerError if the verb failed, with TrainerLost if the process is gone."""

    def __init__(self, policy: str, channel: Channel, running: asyncio.Task[None]) -> None:
        self._policy, self._channel, self._running = policy, channel, running

    async def create(self, weights_dir: str) -> Published:
        return unpack_published(await self._call("create", {"weights_dir": weights_dir}))

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        await self._call(
            "load", {"weights_uri": weights_uri, "state_path": state_path, "reference_uri": reference_uri}
        )

    async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
        message = {"batch": pack_micro_batch(batch), "wants": list(wants)}
        return unpack_forward(await self._call("forward", message))

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        return unpack_gradient(await self._call("forward_backward", pack_micro_batch(batch)))

    async def export_gradients(self, *, path: str) -> GradientSums:
        return unpack_sums(await self._call("export_gradients", {"path": path}))

    async def add_gradients(self, *, path: str) -> None:
        await self._call("add_gradients", {"path": path})

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        return unpack_update(await self._call("optim_step", {"scale": scale, "warm": warm}))

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        return unpack_published(await self._call("publish", {"weights_dir": weights_dir, "version": version}))

    async def save(self, *, state_path: str) -> str | None:
        digest: str | None = await self._call("save", {"state_path": state_path})
        return digest

    async def close(self) -> None:
        """Closes the connection, at which the process ends. Closing twice, or a lost trainer, is fine."""
        self._channel.close()
        await asyncio.wait([self._running])

    async def _call(self, verb: str, message: dict[str, Any]) -> Any:
        try:
            return await self._channel.call(verb, message)
        except PeerGone as error:
            raise TrainerLost(f"policy={self._policy} {verb}: {error}") from error
        except RemoteError as error:
            tail = "\n".join(error.remote_traceback.rstrip().splitlines()[-_TRACEBACK_LINES:])
            raise TrainerError(f"{error.remote_message or error.remote_type}\n{tail}") from error


async def connect_trainer(policy: str, socket_path: Path, *, timeout_s: float) -> TrainerClient:
    """A client of the trainer that listens, or soon will, at `socket_path`.

    Raises: TimeoutError naming the socket, if nothing listens there within `timeout_s`.
    """
    channel, running = await connect(socket_path, timeout_s=timeout_s)
    return TrainerClient(policy, channel, running)
