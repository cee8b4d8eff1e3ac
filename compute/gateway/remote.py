"""The gateway in another process: both ends of its channel to the conductor, as plain data.

`RemoteGateway` is the conductor's end, a `Gateway`; `RemoteDesk` the gateway's, a `CallDesk`. Errors that the
two protocols name cross the wire as themselves. Messages arrive in the order in which they were sent, so that
the end of a call whose client stopped waiting finds the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megloom.compute.cluster.rpc import CallHandler, Channel, PeerGone, RemoteError, connect
from megloom.compute.gateway.protocol import (
    Admission,
    AgentRoute,
    CallDesk,
    CallEnd,
    CallRequest,
    EpisodeCounts,
    Gateway,
    GatewayLost,
    NoPlace,
    NotAdmitted,
    Placement,
    Sampled,
)
from megloom.compute.rollout.protocol import Endpoint

_TYPED: Mapping[str, type[Exception]] = {error.__name__: error for error in (NotAdmitted, NoPlace)}


class RemoteGateway:
    """The conductor's end. Everything raises GatewayLost once the process is gone."""

    def __init__(self, name: str, channel: Channel, reading: asyncio.Task[None]) -> None:
        self.name, self._channel, self._reading = name, channel, reading

    async def load_chats(self, directories: Mapping[str, str]) -> None:
        """See `Gateway.load_chats`."""
        await self._call("load_chats", dict(directories))

    async def admit(self, admission: Admission) -> Endpoint:
        """See `Gateway.admit`."""
        return Endpoint(**await self._call("admit", asdict(admission)))

    async def close_episode(self, episode_id: str, attempt: int) -> EpisodeCounts:
        """See `Gateway.close_episode`."""
        data = await self._call("close_episode", {"episode_id": episode_id, "attempt": attempt})
        return EpisodeCounts(problems=tuple(data.pop("problems")), **data)

    async def close(self) -> None:
        """Closes the channel, with which the process ends."""
        self._channel.close()
        await asyncio.wait([self._reading])

    async def _call(self, method: str, payload: Any) -> Any:
        try:
            return await self._channel.call(method, payload)
        except PeerGone as error:
            raise GatewayLost(f"gateway {self.name}: gone during {method} ({error})") from None


Complete = Callable[[Placement], Placement]


def _as_it_is(placement: Placement) -> Placement:
    return placement


async def connect_gateway(
    name: str, socket_path: Path, desk: CallDesk, *, timeout_s: float, complete: Complete = _as_it_is
) -> RemoteGateway:
    """Connects to a gateway that may still be starting, and serves its calls from `desk`.

    `complete` adds to the desk's places what only the starter of the engines knows.
    Raises: TimeoutError naming the socket.
    """
    calls = _desk_calls(desk, complete)
    channel, reading = await connect(socket_path, timeout_s=timeout_s, calls=calls)
    return RemoteGateway(name, channel, reading)


def _desk_calls(desk: CallDesk, complete: Complete) -> Mapping[str, CallHandler]:
    """What the conductor's end answers the gateway."""

    async def place(payload: dict[str, Any]) -> Any:
        call = CallRequest(
            **{
                **payload,
                "parents": tuple((parent, kind) for parent, kind in payload["parents"]),
                "prompt_ids": tuple(payload["prompt_ids"]),
                "messages": tuple(payload["messages"]),
            }
        )
        return asdict(complete(await desk.place(call)))

    async def replace(payload: dict[str, Any]) -> Any:
        placement = await desk.replace(payload["invocation_id"], payload["rid"], payload["cause"])
        return asdict(complete(placement))

    async def end(payload: dict[str, Any]) -> None:
        await desk.end(CallEnd(**{**payload, "sampled": _sampled(payload["sampled"])}))

    return {"place": place, "replace": replace, "end": end}


class RemoteDesk:
    """The gateway's end. If the conductor is gone nobody is admitted any more."""

    def __init__(self, channel: Callable[[], Channel]) -> None:
        self._channel = channel

    async def place(self, call: CallRequest) -> Placement:
        """See `CallDesk.place`."""
        return _placement(await self._answer("place", _plain(call)))

    async def replace(self, invocation_id: str, rid: str, cause: str) -> Placement:
        """See `CallDesk.replace`."""
        payload = {"invocation_id": invocation_id, "rid": rid, "cause": cause}
        return _placement(await self._answer("replace", payload))

    async def end(self, end: CallEnd) -> None:
        """See `CallDesk.end`."""
        await self._answer("end", {**_plain(end), "sampled": _plain(end.sampled)})

    async def _answer(self, method: str, payload: dict[str, Any]) -> Any:
        try:
            return await self._channel().call(method, payload)
        except RemoteError as error:
            typed = _TYPED.get(error.remote_type)
            if typed is None:
                raise
            raise typed(error.remote_message) from None
        except PeerGone as error:
            raise NotAdmitted(f"the conductor is gone ({error})") from None


def gateway_calls(gateway: Callable[[], Gateway]) -> Mapping[str, CallHandler]:
    """What the gateway's end answers the conductor."""

    async def load_chats(directories: dict[str, str]) -> None:
        await gateway().load_chats(directories)

    async def admit(payload: dict[str, Any]) -> Any:
        agents = {name: AgentRoute(**route) for name, route in payload.pop("agents").items()}
        return asdict(await gateway().admit(Admission(agents=agents, **payload)))

    async def close_episode(payload: dict[str, Any]) -> Any:
        return asdict(await gateway().close_episode(payload["episode_id"], payload["attempt"]))

    return {"load_chats": load_chats, "admit": admit, "close_episode": close_episode}


def _plain(record: CallRequest | CallEnd | Sampled) -> dict[str, Any]:
    """The record's fields as they are: `asdict` would copy each of thousands of tokens."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _sampled(data: dict[str, Any]) -> Sampled:
    return Sampled(
        token_ids=tuple(data["token_ids"]),
        logprobs=tuple(data["logprobs"]),
        version_spans=tuple((version, start, end) for version, start, end in data["version_spans"]),
    )


def _placement(data: dict[str, Any]) -> Placement:
    return Placement(**{**data, "stop_token_ids": tuple(data["stop_token_ids"])})
