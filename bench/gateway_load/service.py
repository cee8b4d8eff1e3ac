"""The gateway under load in a process of its own, and the handle by which the benchmark asks it.

The HTTP side is the production server's; behind it stand the fakes. Commands come over a pipe that the event
loop watches, so nothing runs beside the gateway but while a command is answered.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import secrets
import socket
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway_load.fakes import CheckingDesk, InstantEngine

from megloom.compute.gateway.app import GatewayApp
from megloom.compute.gateway.protocol import Admission, AgentRoute
from megloom.compute.gateway.server import BACKLOG, http_server
from megloom.compute.trainers.tokenizer import write_tokenizer
from megloom.compute.workload import Tokenizer

RUN, AGENT, POLICY = "bench", "solver", "solver"
ANSWER_TOKENS = 32
TOKENIZER = Tokenizer(
    special=("<user>", "<assistant>", "<end>"),
    words=tuple(f"{space}w{number}" for number in range(1000) for space in ("", " ")),
    pattern=" ?[^ <>]+",
    chat_template=(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}<assistant>"
    ),
    stop="<end>",
)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LIFETIME_S = 3600.0
REPLY_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What the gateway's process says of itself. `traced_bytes` is 0 unless it traces its memory."""

    num_ended: int
    num_new_tokens: int
    num_open_episodes: int
    rss_mib: float
    traced_bytes: int
    problems: tuple[str, ...]


class Gateway:
    """The benchmark's end. A context manager: the process ends with the block."""

    def __init__(self, *, is_traced: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, is_traced), daemon=True)
        self._process.start()
        child.close()
        self.address: tuple[str, int] = tuple(self._receive())

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.join()

    def admit(self, episode_ids: Sequence[str]) -> list[tuple[str, str]]:
        """Admits episodes; returns (path of its OpenAI base, token) of each."""
        return [tuple(pair) for pair in self._ask("admit", list(episode_ids))]

    def close_episodes(self, episode_ids: Sequence[str], num_calls: int) -> None:
        """Closes episodes of `num_calls` calls each."""
        self._ask("close", list(episode_ids), num_calls)

    def state(self) -> State:
        """What it has recorded and what it weighs, after a collection."""
        return State(**self._ask("state"))

    def cpu_s(self) -> float:
        """CPU seconds that the process has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._receive()

    def _receive(self) -> Any:
        deadline = time.monotonic() + REPLY_S
        while not self._pipe.poll(0.1):
            if not self._process.is_alive():
                raise RuntimeError(f"the gateway's process ended with {self._process.exitcode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway's process did not answer within {REPLY_S:.0f} s")
        return self._pipe.recv()


def _serve(pipe: Connection, is_traced: bool) -> None:
    """Entry of the process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as at,
    ):
        asyncio.run(_run(pipe, Path(folder), at, is_traced))


async def _run(pipe: Connection, folder: Path, listener: socket.socket, is_traced: bool) -> None:
    tokenizer = write_tokenizer(TOKENIZER, folder)
    text = " ".join(f"w{number}" for number in range(ANSWER_TOKENS - 1))
    answer_ids = tuple(tokenizer.encode(f"{text}{TOKENIZER.stop}", add_special_tokens=False).ids)
    assert len(answer_ids) == ANSWER_TOKENS
    desk, engine = CheckingDesk(answer_ids=answer_ids), InstantEngine(answer_ids)
    host, port = listener.getsockname()
    app = GatewayApp(desk=desk, engines=lambda placement: engine, base_url=f"http://{host}:{port}")
    await app.load_chats({POLICY: str(folder)})
    if is_traced:
        tracemalloc.start()
    commands = _Commands(app, desk)
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.take(pipe))
    pipe.send((host, port))
    await http_server(app).serve(sockets=[listener])


class _Commands:
    """Answers the benchmark, one command after the other."""

    def __init__(self, app: GatewayApp, desk: CheckingDesk) -> None:
        self._app, self._desk = app, desk
        self._answering: set[asyncio.Task[None]] = set()
        self._verbs: dict[str, Callable[..., Any]] = {
            "admit": self._admit,
            "close": self._close,
            "state": self._state,
        }

    def take(self, pipe: Connection) -> None:
        """The loop's reader."""
        task = asyncio.ensure_future(self._answer(pipe, *pipe.recv()))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, pipe: Connection, verb: str, *arguments: Any) -> None:
        pipe.send(await self._verbs[verb](*arguments))

    async def _admit(self, episode_ids: list[str]) -> list[tuple[str, str]]:
        admitted = []
        for episode_id in episode_ids:
            route = AgentRoute(policy=POLICY, max_tokens=ANSWER_TOKENS, temperature=1.0)
            endpoint = await self._app.admit(
                Admission(
                    run=RUN,
                    episode_id=episode_id,
                    attempt=1,
                    token=secrets.token_hex(16),
                    agents={AGENT: route},
                    lifetime_s=LIFETIME_S,
                )
            )
            admitted.append((urlsplit(endpoint.openai_url).path, endpoint.token))
        return admitted

    async def _close(self, episode_ids: list[str], num_calls: int) -> None:
        for episode_id in episode_ids:
            counts = await self._app.close_episode(episode_id, 1)
            self._desk.close(episode_id, num_calls)
            if (counts.num_calls, counts.num_failed, counts.num_unusable) != (num_calls, 0, 0):
                self._desk.problems.append(f"{episode_id}: the gateway counted {counts}")

    async def _state(self) -> dict[str, Any]:
        gc.collect()
        state = State(
            num_ended=self._desk.num_ended,
            num_new_tokens=self._desk.num_new_tokens,
            num_open_episodes=len(self._app.episodes),
            rss_mib=_rss_mib(),
            traced_bytes=tracemalloc.get_traced_memory()[0],
            problems=tuple(self._desk.problems),
        )
        return asdict(state)


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
