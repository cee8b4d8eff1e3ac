"""The conductor's end of a workload worker: `megloom.compute.rollout.protocol.Worker` over a channel."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megloom.compute.cluster.rpc import Channel, PeerGone, RemoteError, connect
from megloom.compute.graph.records import TaskRecord
from megloom.compute.rollout.protocol import (
    AgentPlan,
    CallAnswer,
    CallOpened,
    CallPrompt,
    CallScore,
    DemonstrationRow,
    EpisodeEvents,
    EpisodeOrder,
    EpisodeOutcome,
    FieldReady,
    WorkerLost,
    WorkloadError,
    WorkloadPlan,
)


class WorkerClient:
    """Calls raise WorkerLost if the process is gone and WorkloadError if its code refused."""

    def __init__(self, name: str, channel: Channel, reading: asyncio.Task[None]) -> None:
        self.name, self._channel, self._reading = name, channel, reading

    async def describe(self) -> WorkloadPlan:
        data = await self._call("describe")
        agents = {name: AgentPlan(**agent) for name, agent in data.pop("agents").items()}
        return WorkloadPlan(agents=agents, **data)

    async def tasks(self, split: str) -> list[TaskRecord]:
        records: list[TaskRecord] = []
        while True:
            page = await self._call("tasks", {"split": split, "start": len(records)})
            records += [TaskRecord(**row) for row in page["rows"]]
            if len(records) >= page["total"]:
                return records

    async def load_tokenizers(self, directories: dict[str, str]) -> dict[str, list[int]]:
        answer: dict[str, list[int]] = await self._call("load_tokenizers", directories)
        return answer

    async def demonstrations(self, num_per_agent: int, seed: int) -> list[DemonstrationRow]:
        rows = await self._call("demonstrations", {"num": num_per_agent, "seed": seed})
        return [
            DemonstrationRow(
                agent=row["agent"],
                policy=row["policy"],
                prompt_ids=tuple(row["prompt_ids"]),
                answer_ids=tuple(row["answer_ids"]),
            )
            for row in rows
        ]

    async def run_episode(self, order: EpisodeOrder) -> EpisodeOutcome:
        data = await self._call("run_episode", asdict(order))
        calls = tuple(CallScore(**call) for call in data.pop("calls"))
        metrics = {name: (pair[0], pair[1]) for name, pair in data.pop("metrics").items()}
        warnings = tuple(data.pop("warnings"))
        return EpisodeOutcome(calls=calls, metrics=metrics, warnings=warnings, **data)

    def answer(self, answer: CallAnswer) -> None:
        self._channel.notify("answer", asdict(answer))

    def cancel(self, episode_id: str, attempt: int) -> None:
        self._channel.notify("cancel", {"episode_id": episode_id, "attempt": attempt})

    async def close(self) -> None:
        self._channel.close()
        await asyncio.wait([self._reading])

    async def _call(self, method: str, payload: Any = None) -> Any:
        try:
            return await self._channel.call(method, payload)
        except PeerGone as error:
            raise WorkerLost(f"worker {self.name}: gone during {method} ({error})") from None
        except RemoteError as error:
            raise WorkloadError(f"worker {self.name}: {error.remote_message}") from error


async def connect_worker(
    name: str, socket_path: Path, events: EpisodeEvents, *, timeout_s: float
) -> WorkerClient:
    """Connects to a worker that may still be starting.

    Raises: TimeoutError naming the socket.
    """
    channel, reading = await connect(
        socket_path,
        timeout_s=timeout_s,
        notices={
            "call_opened": lambda payload: events.call_opened(_opened(payload)),
            "call_prompt": lambda payload: events.call_prompt(_prompt(payload)),
            "field_ready": lambda payload: events.field_ready(FieldReady(**payload)),
        },
    )
    return WorkerClient(name, channel, reading)


def _opened(payload: dict[str, Any]) -> CallOpened:
    prompt_ids = payload["prompt_ids"]
    return CallOpened(
        invocation_id=payload["invocation_id"],
        episode_id=payload["episode_id"],
        agent=payload["agent"],
        index=payload["index"],
        parents=tuple((parent, kind) for parent, kind in payload["parents"]),
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
        messages=tuple(payload["messages"]),
    )


def _prompt(payload: dict[str, Any]) -> CallPrompt:
    return CallPrompt(
        invocation_id=payload["invocation_id"],
        prompt_ids=tuple(payload["prompt_ids"]),
        messages=tuple(payload["messages"]),
    )
