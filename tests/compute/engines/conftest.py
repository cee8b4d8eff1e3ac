"""Tiny random models, batchers over them, and an engine process behind `engine_url`.

A real SGLang can take the local engine's place in the contract suite: set MEGLOOM_CONTRACT_URL,
MEGLOOM_CONTRACT_TOKEN, MEGLOOM_CONTRACT_MODELS (two folders of one architecture joined by a colon, the
first one served) and MEGLOOM_CONTRACT_CAPABILITIES (names from `CAPABILITIES`, joined by commas).
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from megloom.compute.engines.batcher import Batcher
from megloom.compute.engines.checkpoint import read_config, read_tensors
from megloom.compute.engines.client import HttpEngine
from megloom.compute.engines.live_request import LiveRequest
from megloom.compute.engines.model import Weights, pack_weights
from megloom.compute.engines.protocol import EngineInfo, GenerateRequest
from megloom.compute.engines.runner import Runner, TorchRunner
from megloom.compute.engines.server import EngineArgs, serve

VOCAB_SIZE, CONTEXT_LENGTH = 61, 4096
CPU = torch.device("cpu")
CAPABILITIES = frozenset(
    {
        "seeds",  # the same seed replays the same tokens
        "vocabulary_check",  # an id outside the vocabulary is a 400, not the end of the server
        "exact_abort",  # abort takes the whole rid, not a prefix
        "config_check",  # weights of another architecture are refused
        "digest",  # a digest in the update is verified
        "clean_refusal",  # a refused update changes nothing
        "training_flag",  # truncated sampling is refused for training requests
        "guards_all_routes",  # 401 comes before routing
    }
)

SaveModel = Callable[..., str]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(capability): skipped for engines without the capability")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """Returns `save(seed, architecture="qwen3", **config overrides) -> folder` of a tiny random model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    classes = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}

    def save(seed: int, architecture: str = "qwen3", **overrides: Any) -> str:
        config_class, model_class = classes[architecture]
        knobs: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": CONTEXT_LENGTH,
            "initializer_range": 0.3,  # far from uniform logits
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp(f"{architecture}-{seed}-")
        model_class(config_class(**knobs | overrides)).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture(scope="session")
def model_dir(save_model: SaveModel) -> str:
    return save_model(1)


@pytest.fixture(scope="session")
def other_model_dir(save_model: SaveModel) -> str:
    """Same architecture as `model_dir`, other weights."""
    return save_model(2)


@pytest.fixture(scope="session")
def reference_logprobs() -> Callable[..., torch.Tensor]:
    """Returns `f(folder, token_ids, num_prompt, temperature) -> logprobs` of the tokens behind the prompt."""
    from transformers import AutoModelForCausalLM

    models: dict[str, Any] = {}

    def logprobs(
        folder: str, token_ids: list[int], num_prompt: int, temperature: float = 1.0
    ) -> torch.Tensor:
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            logits = models[folder](ids).logits[0, num_prompt - 1 : -1].float()
        scores = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        return scores.gather(1, ids[0, num_prompt:, None]).squeeze(1)

    return logprobs


def load_weights(folder: str, device: torch.device = CPU) -> Weights:
    config = read_config(folder)
    return pack_weights(read_tensors(folder, config, device=device, dtype=torch.float32), config)


def build_runner(kind: str, folder: str, device: str = "cpu") -> Runner:
    """Returns a runner of a kind, "torch" or "compiled", over the model in a folder."""
    config, place = read_config(folder), torch.device(device)
    weights = load_weights(folder, place)
    if kind == "torch":
        return TorchRunner(config, weights, device=place, dtype=torch.float32)
    compiled = pytest.importorskip("megloom.compute.engines.compiled", exc_type=ImportError)
    assert compiled.unfit_reason(config, place, torch.float32) is None
    return compiled.CompiledRunner(config, weights)


@pytest.fixture(scope="session")
def make_runner() -> Callable[..., Runner]:
    return build_runner


@pytest.fixture(scope="session", params=["torch", "compiled"])
def make_batcher(request: pytest.FixtureRequest) -> Callable[..., Batcher]:
    """Returns `make(folder, max_slots=8, …, runner=None) -> Batcher`, for each kind of runner."""

    def make(
        folder: str,
        *,
        max_slots: int = 8,
        prefill_budget_tokens: int = 64,
        version: int = 0,
        max_steps: int = 1,
        runner: Runner | None = None,
    ) -> Batcher:
        return Batcher(
            runner or build_runner(request.param, folder),
            version=version,
            max_slots=max_slots,
            prefill_budget_tokens=prefill_budget_tokens,
            max_steps=max_steps,
        )

    return make


@pytest.fixture(scope="session")
def weights_of() -> Callable[[str], Weights]:
    return load_weights


@pytest.fixture(scope="session")
def make_live() -> Callable[..., LiveRequest]:
    """Returns a builder of live requests with keyword overrides."""

    def make(index: int, prompt_ids: list[int], **overrides: Any) -> LiveRequest:
        knobs: dict[str, Any] = {
            "max_tokens": 8,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "seed": index,
            "stop_ids": frozenset(),
        }
        return LiveRequest(rid=f"{index:032x}", prompt_ids=prompt_ids, **knobs | overrides)

    return make


@pytest.fixture(scope="session")
def make_request() -> Callable[..., GenerateRequest]:
    """Returns a builder of client requests with keyword overrides."""

    def make(index: int = 1, **overrides: Any) -> GenerateRequest:
        knobs: dict[str, Any] = {
            "rid": f"{index:032x}",
            "token_ids": (3, 1, 4, 1, 5),
            "max_tokens": 8,
            "temperature": 1.0,
            "seed": index,
            "stop_token_ids": (),
            "training": True,
        }
        return GenerateRequest(**knobs | overrides)

    return make


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUnderTest:
    """Where the engine of the contract suite listens and what it can do beyond the common ground."""

    url: str
    token: str
    model_dir: str
    other_model_dir: str
    capabilities: frozenset[str]


@pytest.fixture(scope="session")
def fork_server() -> Any:
    """A fork server with the engine imported: an engine starts in a fraction of a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megloom.compute.engines.server"])
    return context


@pytest.fixture
def start_engine(fork_server: Any, tmp_path: Path) -> Iterator[Callable[..., tuple[str, Any]]]:
    """Returns `start(model_dir, **EngineArgs overrides) -> (url, process)`; ends them all afterwards."""
    processes = []

    def start(folder: str, **overrides: Any) -> tuple[str, Any]:
        address_file = tmp_path / f"address-{len(processes)}.json"
        knobs: dict[str, Any] = {"policy": "solver", "version": 3, "token": "secret", "incarnation": "first"}
        args = EngineArgs(model_dir=folder, address_file=str(address_file), **knobs | overrides)
        process = fork_server.Process(target=serve, args=(args,))
        process.start()
        processes.append(process)
        deadline = time.monotonic() + 110
        while not address_file.exists():
            assert process.is_alive(), "the engine ended before it listened"
            assert time.monotonic() < deadline, "the engine did not listen within 110 s"
            time.sleep(0.005)
        address = json.loads(address_file.read_text())
        return f"http://{address['host']}:{address['port']}", process

    yield start
    for process in processes:
        process.terminate()
        process.join(timeout=10)
        process.close()


@pytest.fixture
def engine_under_test(request: pytest.FixtureRequest) -> EngineUnderTest:
    url = os.environ.get("MEGLOOM_CONTRACT_URL")
    if url:
        served, other = os.environ["MEGLOOM_CONTRACT_MODELS"].split(":")
        named = os.environ.get("MEGLOOM_CONTRACT_CAPABILITIES", "")
        token = os.environ["MEGLOOM_CONTRACT_TOKEN"]
        capabilities = frozenset(filter(None, named.split(",")))
    else:
        served, other = (request.getfixturevalue(name) for name in ("model_dir", "other_model_dir"))
        url, _ = request.getfixturevalue("start_engine")(served)
        token, capabilities = "secret", CAPABILITIES
    unknown = capabilities - CAPABILITIES
    assert not unknown, f"unknown capabilities {unknown}"
    missing = {mark.args[0] for mark in request.node.iter_markers("needs")} - capabilities
    if missing:
        pytest.skip(f"this engine lacks {sorted(missing)}")
    return EngineUnderTest(
        url=url, token=token, model_dir=served, other_model_dir=other, capabilities=capabilities
    )


@pytest.fixture
def engine_url(engine_under_test: EngineUnderTest) -> str:
    return engine_under_test.url


class RawHttp:
    """The engine's API without our client in between."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Returns (status, body), the body parsed if it is JSON."""
        async with self._session.request(method, self._url + path, json=body) as response:
            text = await response.text()
            is_json = response.content_type == "application/json" and text
            return response.status, json.loads(text) if is_json else text

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        return await self.call("POST", path, {} if body is None else body)

    async def metric(self, name: str) -> float:
        """Returns one value from `/metrics`."""
        _, text = await self.call("GET", "/metrics")
        line = next(line for line in text.splitlines() if line.startswith(f"sglang:{name}{{"))
        return float(line.rsplit(" ", 1)[1])

    async def wait_until(self, name: str, reached: Callable[[float], bool]) -> None:
        """Returns when the metric has reached a value; asks the engine again and again."""
        async with asyncio.timeout(30):
            while not reached(await self.metric(name)):
                pass


Scenario = Callable[[HttpEngine, RawHttp], Awaitable[None]]


@pytest.fixture
def with_engine(engine_under_test: EngineUnderTest) -> Callable[[Scenario], None]:
    """Returns a runner of coroutines that take (client, raw HTTP) of one fresh engine."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            assumed = EngineInfo(
                policy="solver",
                version=3,
                vocab_size=VOCAB_SIZE,
                context_length=CONTEXT_LENGTH,
                incarnation="first",
                paused=False,
            )
            client = HttpEngine(engine_under_test.url, engine_under_test.token, assumed=assumed)
            headers = {"Authorization": f"Bearer {engine_under_test.token}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                try:
                    await scenario(client, RawHttp(session, engine_under_test.url))
                finally:
                    await client.close()

        asyncio.run(main())

    return run
