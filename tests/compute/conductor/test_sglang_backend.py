"""A session's engines as real SGLang: processes that start, answer, and end with the session.

A stand-in takes SGLang's place (`sglang_stand_in.py`); `tests/sglang/test_session.py` starts the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from megloom.compute.cluster.local import LocalCluster
from megloom.compute.cluster.protocol import ClusterError
from megloom.compute.conductor import local_backend
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.local_backend import LocalBackend
from megloom.compute.engines.protocol import EngineRefused, GenerateRequest
from megloom.compute.gateway.protocol import Admission, AgentRoute
from tests.compute.gateway.test_server import EPISODE, MESSAGES, Conductor, ids_of
from tests.service_fixture import wait_until_gone

pytestmark = pytest.mark.timeout(120)
CELL, VOCAB_SIZE, CONTEXT_LENGTH = "engine/p/0", 5000, 512
STAND_IN = Path(__file__).with_name("sglang_stand_in.py")


def interpreter(folder: Path, script: str = f'exec {sys.executable} {STAND_IN} "$@"') -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def model(folder: Path, **does: Any) -> str:
    """A folder of a model's limits, and of what the stand-in does with it."""
    (path := folder / "model").mkdir(exist_ok=True)
    limits = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LENGTH}
    (path / "config.json").write_text(json.dumps(limits))
    (path / "stand_in.json").write_text(json.dumps({"ids": [7], "is_ready": True, **does}))
    return str(path)


def child_of(uri: str) -> dict[int, str]:
    """The process that the stand-in started last: pid → what it is."""
    return {int(Path(uri, "child.pid").read_text()): "child of the stand-in"}


@asynccontextmanager
async def backend_at(folder: Path, python: str) -> AsyncIterator[tuple[LocalBackend, LocalCluster]]:
    cells = {"engine": "sglang", "engine_python": python, "engine_slots": 4}
    config = SessionConfig.parse({"workload": "a:b", "run": "r", "steps": 1, "cells": cells})
    cluster = LocalCluster(folder / "logs", preload=("megloom.compute.gateway.server",))
    backend = LocalBackend(config=config, home=folder, cluster=cluster)
    try:
        yield backend, cluster
    finally:
        await backend.close()
        assert cluster.names("") == []
        await cluster.close()


def with_backend(
    folder: Path, python: str, scenario: Callable[[LocalBackend, LocalCluster], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with asyncio.timeout(100), backend_at(folder, python) as (backend, cluster):
            await scenario(backend, cluster)

    asyncio.run(main())


def test_an_engine_has_the_limits_of_its_model_and_ends_with_its_children(tmp_path: Path) -> None:
    uri = model(tmp_path)

    async def scenario(backend: LocalBackend, cluster: LocalCluster) -> None:
        engine = await backend.start_engine(CELL, policy="p", uri=uri, version=3)
        info = await engine.info()
        assert (info.policy, info.version, info.incarnation) == ("p", 3, f"{CELL}.1")
        assert (info.vocab_size, info.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
        await engine.load_version(uri, 4, "digest")
        assert ((await engine.info()).policy, (await engine.info()).version) == ("p", 4)
        with pytest.raises(EngineRefused, match=f"{VOCAB_SIZE} is outside the vocabulary"):
            await engine.generate(
                GenerateRequest(
                    rid="0" * 32,
                    token_ids=(VOCAB_SIZE,),
                    max_tokens=1,
                    temperature=1.0,
                    seed=0,
                    stop_token_ids=(),
                    training=True,
                )
            )

        pid = cluster.pid(f"r:{CELL}")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        lost = await backend.exits.get()
        assert (lost.name, lost.incarnation) == (CELL, 1)
        wait_until_gone(child_of(uri))
        await backend.stop(CELL)
        again = await backend.start_engine(CELL, policy="p", uri=uri, version=5)
        assert ((await again.info()).version, (await again.info()).incarnation) == (5, f"{CELL}.2")

    with_backend(tmp_path, interpreter(tmp_path), scenario)
    wait_until_gone(child_of(uri))


def test_programs_are_answered_by_it_through_the_gateways_process(tmp_path: Path) -> None:
    uri = model(tmp_path, ids=ids_of(tmp_path, "hello"))

    async def scenario(backend: LocalBackend, cluster: LocalCluster) -> None:
        async with asyncio.TaskGroup() as tasks:
            conductor = Conductor(tasks, [])
            conductor.dispatcher.add_engine(CELL, policy="p", capacity=4)
            engine = await backend.start_engine(CELL, policy="p", uri=uri, version=3)
            conductor.dispatcher.engine_up(CELL, engine)
            gateway = await backend.start_gateway("gateway/0", conductor.desk)
            await gateway.load_chats({"p": str(tmp_path / "chat")})
            admission = Admission(
                run="r",
                episode_id=EPISODE,
                attempt=0,
                token="episode-secret",
                agents={"coder": AgentRoute(policy="p", max_tokens=64, temperature=0.7)},
                lifetime_s=60.0,
            )
            place = await gateway.admit(admission)
            async with openai.AsyncOpenAI(
                base_url=place.openai_url, api_key=place.token, max_retries=0, timeout=30.0
            ) as client:
                answer = await client.chat.completions.create(model="coder", messages=MESSAGES)
            assert answer.choices[0].message.content == "hello"
            counts = await gateway.close_episode(EPISODE, 0)
            assert (counts.num_calls, counts.num_failed, counts.num_unusable) == (1, 0, 0)
            assert conductor.lost == []

    with_backend(tmp_path, interpreter(tmp_path), scenario)


def test_one_that_does_not_become_ready_is_named_with_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_backend, "SGLANG_START_S", 0.1)

    async def scenario(backend: LocalBackend, cluster: LocalCluster) -> None:
        with pytest.raises(ClusterError, match=rf"{CELL}: SGLang at http://127\S+ was not ready after 0.1 s"):
            await backend.start_engine(CELL, policy="p", uri=model(tmp_path, is_ready=False), version=3)

    with_backend(tmp_path, interpreter(tmp_path), scenario)


def test_one_that_ends_at_its_start_is_told_with_its_log(tmp_path: Path) -> None:
    async def scenario(backend: LocalBackend, cluster: LocalCluster) -> None:
        with pytest.raises(ClusterError, match=f"{CELL} ended at its start.*\nno device for") as ended:
            await backend.start_engine(CELL, policy="p", uri=model(tmp_path, end=3), version=3)
        assert "'--api-key', '[token]'" in str(ended.value)

    with_backend(tmp_path, interpreter(tmp_path), scenario)


@pytest.mark.parametrize(
    ("script", "message"),
    [("exit 1", "has no sglang; install megloom.sglang. there, or name"), (None, "No such file")],
)
def test_a_session_without_sglang_is_refused_before_anything_starts(
    script: str | None, message: str, tmp_path: Path
) -> None:
    python = interpreter(tmp_path, script) if script else str(tmp_path / "missing")

    async def scenario(backend: LocalBackend, cluster: LocalCluster) -> None:
        events: Any = None
        with pytest.raises(ClusterError, match=message) as refused:
            await backend.start_worker("worker/0", events)
        assert "\n" not in str(refused.value)
        assert backend.incarnation("worker/0") == 0
        with pytest.raises(ClusterError, match=message):
            await backend.start_engine(CELL, policy="p", uri=model(tmp_path), version=3)

    with_backend(tmp_path, python, scenario)


def test_a_folder_without_limits_is_named(tmp_path: Path) -> None:
    uri = model(tmp_path)
    Path(uri, "config.json").write_text("{}")

    async def scenario(backend: LocalBackend, cluster: LocalCluster) -> None:
        with pytest.raises(ClusterError, match=r"config.json: no vocabulary size and context length"):
            await backend.start_engine(CELL, policy="p", uri=uri, version=3)

    with_backend(tmp_path, interpreter(tmp_path), scenario)


def test_the_interpreter_is_a_place_the_engine_is_not() -> None:
    values = {"workload": "a:b", "run": "r", "steps": 1}
    plain = SessionConfig.parse(values).config_hash()
    assert SessionConfig.parse({**values, "cells": {"engine_python": "/p"}}).config_hash() == plain
    assert SessionConfig.parse({**values, "cells": {"engine": "sglang"}}).config_hash() != plain
    with pytest.raises(ValueError, match=r"cells.engine: .*sglang runs on device cpu or cuda, not cuda:1"):
        SessionConfig.parse({**values, "cells": {"engine": "sglang", "device": "cuda:1"}})
