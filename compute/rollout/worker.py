"""The workload worker process: loads the user's code afresh, runs episodes, talks to the conductor.

Started by the cluster with `serve(args)`; serves one conductor on a unix socket and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megloom.compute.cluster.rpc import CallHandler, Channel, NotifyHandler, serve_one
from megloom.compute.graph.records import TaskRecord
from megloom.compute.rollout import loading
from megloom.compute.rollout.chat import Chat
from megloom.compute.rollout.dataset import DatasetTask, load_tasks
from megloom.compute.rollout.episode import Finished, run_episode, scored_in_part
from megloom.compute.rollout.harness import Programs
from megloom.compute.rollout.late_fields import LateFields
from megloom.compute.rollout.protocol import (
    CallAnswer,
    CallOpened,
    CallPrompt,
    DemonstrationRow,
    Endpoint,
    EpisodeEvents,
    EpisodeOrder,
    EpisodeOutcome,
    FieldReady,
    WorkloadError,
    WorkloadPlan,
)
from megloom.compute.rollout.team import CallBook
from megloom.compute.workload import Workload

log = logging.getLogger(__name__)
MAX_PROGRAMS = 2 * (os.cpu_count() or 1)  # at once in one worker: more would only slow each other down
SCORING_S = 10.0  # before an episode's deadline: programs end so that what they left can be scored
PAGE_CHARS = 16_000_000  # of task rows in one message: far below the channel's largest frame


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerArgs:
    """`data_dir` keeps built datasets between runs; `import_paths` are where the user's modules lie."""

    socket: str
    workload: str
    data_dir: str
    import_paths: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Live:
    """An attempt that runs."""

    book: CallBook
    programs: Programs
    task: asyncio.Task[EpisodeOutcome]


class WorkloadHost:
    """Runs a workload's episodes: `megloom.compute.rollout.protocol.Worker` without the wire."""

    def __init__(self, workload: Workload, *, name: str, data_dir: Path, events: EpisodeEvents) -> None:
        self.workload, self._name, self._data_dir, self._events = workload, name, data_dir, events
        self._tasks: dict[tuple[str, str], DatasetTask] = {}
        self._chats: dict[str, Chat] = {}
        self._live: dict[tuple[str, int], _Live] = {}
        self._books: dict[str, CallBook] = {}
        self._cancelled: set[tuple[str, int]] = set()
        self._late = LateFields(workload.fields, events.field_ready)
        self._slots = asyncio.Semaphore(MAX_PROGRAMS)

    async def describe(self) -> WorkloadPlan:
        modules = loading.code_modules(self.workload, self._name)
        return loading.plan_of(self.workload, modules=modules)

    async def tasks(self, split: str) -> list[TaskRecord]:
        """Loads a split, "train" or "eval", building it first if its source is a function."""
        source = self.workload.tasks if split == "train" else self.workload.eval_tasks
        key = loading.dataset_key(source, self._name)
        cache = self._data_dir / self.workload.name / f"{split}-{key}.parquet"
        pairs = load_tasks(source, split=split, cache=cache)
        self._tasks.update({(split, record.task_id): task for record, task in pairs})
        return [record for record, _ in pairs]

    async def load_tokenizers(self, directories: Mapping[str, str]) -> dict[str, list[int]]:
        self._chats = {policy: Chat(Path(directory)) for policy, directory in directories.items()}
        return {policy: list(chat.stop_ids) for policy, chat in self._chats.items()}

    async def demonstrations(self, num_per_agent: int, seed: int) -> list[DemonstrationRow]:
        """Renders the workload's examples with the agents' own prompts.

        Raises: WorkloadError naming the example whose agent is unknown.
        """
        if self.workload.demonstrate is None:
            return []
        rows = []
        for position, example in enumerate(self.workload.demonstrate(num_per_agent, seed)):
            agent = self.workload.agents.get(example.agent)
            if agent is None:
                raise WorkloadError(f"demonstration {position}: no agent {example.agent!r}")
            chat = self._chats[agent.policy]
            rows.append(
                DemonstrationRow(
                    agent=example.agent,
                    policy=agent.policy,
                    prompt_ids=chat.encode(agent.prompt(*example.arguments)),
                    answer_ids=chat.encode_answer(example.answer),
                )
            )
        return rows

    async def run_episode(self, order: EpisodeOrder) -> EpisodeOutcome:
        task = self._tasks[order.split, order.task_id]
        prefix = f"{order.episode_id}-a{order.attempt}"
        book = CallBook(
            prefix=prefix,
            episode_id=order.episode_id,
            agents=self.workload.agents,
            chats=self._chats,
            events=self._events,
        )
        running = asyncio.current_task()
        assert running is not None
        programs = self._programs(order)
        self._live[order.episode_id, order.attempt] = _Live(book=book, programs=programs, task=running)
        self._books[prefix] = book
        late = partial(self._late.start, task) if order.split == "train" else _no_fields
        try:
            return await run_episode(self.workload, task, order, book, on_scored=late, programs=programs)
        except asyncio.CancelledError:
            if (order.episode_id, order.attempt) not in self._cancelled:
                raise
            running.uncancel()
            return scored_in_part(self.workload, task, order, book, on_scored=late)
        finally:
            book.fail_open("its episode ended")
            del self._live[order.episode_id, order.attempt]
            self._cancelled.discard((order.episode_id, order.attempt))
            del self._books[prefix]

    def _programs(self, order: EpisodeOrder) -> Programs:
        """The programs of an attempt that begins now."""
        loop = asyncio.get_running_loop()
        time_s = order.timeout_s if order.timeout_s is not None else self.workload.training.episode_timeout_s
        end_s = loop.time() + program_time_s(time_s)
        return Programs(
            episode_id=order.episode_id,
            agents=self.workload.agents,
            endpoint=order.endpoint,
            left_s=lambda: end_s - loop.time(),
            slots=self._slots,
        )

    def answer(self, answer: CallAnswer) -> None:
        """Gives a call its answer; one for an episode that has ended is dropped."""
        book = self._books.get(answer.invocation_id.rpartition("-i")[0])
        if book is not None:
            book.receive(answer)

    def cancel(self, episode_id: str, attempt: int) -> None:
        """Ends an attempt. One that runs a program has a little time to score what that left."""
        live = self._live.get((episode_id, attempt))
        if live is None:
            return
        if live.programs.num_running and not live.programs.was_stopped:
            live.programs.stop()
            asyncio.get_running_loop().call_later(SCORING_S, self.cancel, episode_id, attempt)
            return
        self._cancelled.add((episode_id, attempt))
        live.task.cancel()

    async def close(self) -> None:
        self._late.close()
        for live in list(self._live.values()):
            live.task.cancel()


def program_time_s(episode_s: float) -> float:
    """What programs have of an episode's time: the rest is for scoring what they left."""
    return episode_s - min(SCORING_S, episode_s / 4)


def _no_fields(finished: Finished) -> None:
    """Held-out episodes are not trained on: nobody waits for their fields."""


class _ChannelEvents:
    """Announces calls over the channel."""

    def __init__(self, channel: Callable[[], Channel]) -> None:
        self._channel = channel

    def call_opened(self, call: CallOpened) -> None:
        self._channel().notify("call_opened", asdict(call))

    def call_prompt(self, prompt: CallPrompt) -> None:
        self._channel().notify("call_prompt", asdict(prompt))

    def field_ready(self, field: FieldReady) -> None:
        self._channel().notify("field_ready", asdict(field))


def serve(values: dict[str, Any]) -> None:
    """Entry of the process."""
    args = WorkerArgs(**values)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    sys.path[:0] = [entry for entry in args.import_paths if entry not in sys.path]
    asyncio.run(_serve(args))


async def _serve(args: WorkerArgs) -> None:
    holder: list[WorkloadHost] = []
    channels: list[Callable[[], Channel]] = []

    def host() -> WorkloadHost:
        if not holder:
            workload = loading.load_workload(args.workload)
            events = _ChannelEvents(channels[0])
            holder.append(
                WorkloadHost(workload, name=args.workload, data_dir=Path(args.data_dir), events=events)
            )
        return holder[0]

    def calls(channel: Callable[[], Channel]) -> Mapping[str, CallHandler]:
        channels.append(channel)
        return _call_handlers(host)

    def notices(_: Callable[[], Channel]) -> Mapping[str, NotifyHandler]:
        return {
            "answer": lambda payload: host().answer(CallAnswer(**_tuples(payload))),
            "cancel": lambda payload: host().cancel(payload["episode_id"], payload["attempt"]),
        }

    await serve_one(Path(args.socket), calls=calls, notices=notices)


def _call_handlers(host: Callable[[], WorkloadHost]) -> Mapping[str, CallHandler]:
    loaded: dict[str, list[TaskRecord]] = {}

    async def describe(_: Any) -> Any:
        return asdict(await host().describe())

    async def tasks(payload: dict[str, Any]) -> Any:
        """One page of a split from row `start` on; the first page loads it."""
        split, start = payload["split"], payload["start"]
        if start == 0:
            loaded[split] = await host().tasks(split)
        rows, size = [], 0
        for record in loaded[split][start:]:
            rows.append(asdict(record))
            size += len(record.row) + len(record.prompt)
            if size > PAGE_CHARS:
                break
        return {"rows": rows, "total": len(loaded[split])}

    async def load_tokenizers(directories: dict[str, str]) -> Any:
        return await host().load_tokenizers(directories)

    async def demonstrations(payload: dict[str, int]) -> Any:
        return [asdict(row) for row in await host().demonstrations(payload["num"], payload["seed"])]

    async def run(payload: dict[str, Any]) -> Any:
        return asdict(await host().run_episode(_order(payload)))

    return {
        "describe": describe,
        "tasks": tasks,
        "load_tokenizers": load_tokenizers,
        "demonstrations": demonstrations,
        "run_episode": run,
    }


def _order(payload: dict[str, Any]) -> EpisodeOrder:
    endpoint = payload.pop("endpoint")
    return EpisodeOrder(endpoint=Endpoint(**endpoint) if endpoint else None, **payload)


def _tuples(payload: dict[str, Any]) -> dict[str, Any]:
    """Message arrays arrive as lists; our records hold tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in payload.items()}
