"""One real SGLang server for the session, in the place of the local engine of the contract suite.

`make test-sglang` installs it and names its interpreter in MEGLOOM_SGLANG_PYTHON; without it these tests are
skipped. The server is put back before each test: nothing runs, nothing is paused, `model_dir` is version 3.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megloom.compute.engines.client import HttpEngine
from megloom.compute.engines.protocol import EngineInfo, GenerateRequest
from megloom.pipelines.systems.arithmetic_model import MODEL
from tests.sglang.server import RunningServer, running_server

pytest.register_assert_rewrite(
    "tests.compute.engines.test_engine_contract", "tests.compute.engines.test_engine_streaming"
)

from tests.compute.engines.conftest import (  # noqa: E402 - after the rewriting of its assertions
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    EngineUnderTest,
    RawHttp,
    Scenario,
    engine_url,
    one_thread,
    reference_logprobs,
    save_model,
)

# fixtures, used by name
__all__ = ["engine_url", "one_thread", "reference_logprobs", "save_model"]

POLICY, VERSION = "solver", 3
# The demo's default architecture, at the size of vocabulary and context that the contract suite asks for.
ARCHITECTURE: dict[str, Any] = {
    **MODEL.config,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.3,  # far from uniform logits
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(capability): skipped for engines without the capability")


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of an environment with SGLang, or the reason why there is none."""
    python = os.environ.get("MEGLOOM_SGLANG_PYTHON", "")
    if not python:
        pytest.skip("real SGLang is not installed here: `make test-sglang` does it")
    if not Path(python).is_file():
        pytest.skip(f"real SGLang could not be installed: there is no {python}")
    found = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('sglang'))"],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(f"real SGLang could not be installed: {found.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture(scope="session")
def model_dir(save_model: Callable[..., str]) -> str:
    return save_model(1, **ARCHITECTURE)


@pytest.fixture(scope="session")
def other_model_dir(save_model: Callable[..., str]) -> str:
    """Same architecture as `model_dir`, other weights."""
    return save_model(2, **ARCHITECTURE)


@pytest.fixture(scope="session")
def sglang_server(
    sglang_python: str, model_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with running_server(
        python=sglang_python, model_dir=model_dir, policy=POLICY, version=VERSION, log=log
    ) as server:
        yield server


@pytest.fixture
def make_request(request: pytest.FixtureRequest) -> Callable[..., GenerateRequest]:
    """The suite's builder, with request ids that no other test has.

    SGLang notices a client that left some seconds later, and then aborts whatever has that id by now.
    """
    node = hashlib.blake2b(request.node.nodeid.encode(), digest_size=12).hexdigest()

    def make(index: int = 1, **overrides: Any) -> GenerateRequest:
        knobs: dict[str, Any] = {
            "rid": f"{node}{index:08x}",
            "token_ids": (3, 1, 4, 1, 5),
            "max_tokens": 8,
            "temperature": 1.0,
            "seed": index,
            "stop_token_ids": (),
            "training": True,
        }
        return GenerateRequest(**knobs | overrides)

    return make


@pytest.fixture
def engine_under_test(
    request: pytest.FixtureRequest, sglang_server: RunningServer, model_dir: str, other_model_dir: str
) -> EngineUnderTest:
    missing = {mark.args[0] for mark in request.node.iter_markers("needs")}
    if missing:  # on a CPU it has none of the capabilities beyond the common ground: docs/sglang.md
        pytest.skip(f"SGLang on a CPU lacks {sorted(missing)}")
    asyncio.run(_put_back(sglang_server, model_dir))
    return EngineUnderTest(
        url=sglang_server.url,
        token=sglang_server.token,
        model_dir=model_dir,
        other_model_dir=other_model_dir,
        capabilities=frozenset(),
    )


async def _put_back(server: RunningServer, model_dir: str) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.token}"}) as session:
        raw = RawHttp(session, server.url)
        for path, body in (
            ("/continue_generation", {}),
            ("/abort_request", {"abort_all": True}),
            ("/update_weights_from_disk", {"model_path": model_dir, "weight_version": str(VERSION)}),
        ):
            status, answer = await raw.post(path, body)
            assert status == 200, f"{path}: {status} {answer}"


class SglangHttp(RawHttp):
    """The raw API with SGLang's counters read as those of a fresh server.

    `generation_tokens_total` is counted there when a request ends; `realtime_tokens_total` grows with each
    decode step.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        super().__init__(session, url)
        self._decoded_before = 0.0

    async def start_counting(self) -> None:
        """Counts from now on."""
        self._decoded_before = await self._decoded()

    async def metric(self, name: str) -> float:
        if name == "generation_tokens_total":
            return await self._decoded() - self._decoded_before
        return await super().metric(name)

    async def _decoded(self) -> float:
        _, text = await self.call("GET", "/metrics")
        lines = (line for line in text.splitlines() if line.startswith("sglang:realtime_tokens_total{"))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if 'mode="decode"' in line)


@pytest.fixture
def with_engine(engine_under_test: EngineUnderTest) -> Callable[[Scenario], None]:
    """Returns a runner of coroutines that take (client, raw HTTP) of the server."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            assumed = EngineInfo(
                policy=POLICY,
                version=VERSION,
                vocab_size=VOCAB_SIZE,
                context_length=CONTEXT_LENGTH,
                incarnation="first",
                paused=False,
            )
            client = HttpEngine(engine_under_test.url, engine_under_test.token, assumed=assumed)
            headers = {"Authorization": f"Bearer {engine_under_test.token}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                raw = SglangHttp(session, engine_under_test.url)
                await raw.start_counting()
                try:
                    await scenario(client, raw)
                finally:
                    await client.close()

        asyncio.run(main())

    return run
