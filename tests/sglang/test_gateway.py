"""The gateway in front of real SGLang: a program's conversation leaves exact ids, logprobs and versions."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from megloom.compute.engines.client import HttpEngine
from megloom.compute.gateway.app import GatewayApp
from megloom.compute.gateway.protocol import CallRequest, Placement
from megloom.compute.gateway.server import EngineTable, http_server
from megloom.compute.rollout.protocol import Endpoint
from megloom.compute.trainers.tokenizer import write_tokenizer
from tests.compute.engines.conftest import VOCAB_SIZE, EngineUnderTest, RawHttp, Scenario
from tests.compute.gateway.fakes import FakeDesk, admission
from tests.sglang.conftest import VERSION
from tests.sglang.test_training_step import TOKENIZER

pytestmark = [
    pytest.mark.usefixtures("sglang_python"),  # first of all: without SGLang nothing else is set up
    pytest.mark.filterwarnings("error"),
    pytest.mark.timeout(900),  # the first test starts the server
]

TEMPERATURE, MAX_TOKENS, NUM_TURNS = 0.7, 24, 3  # the temperature is the agent's, in the fakes' admission
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}<assistant>"
)
# Words follow each other with nothing between, as the model writes them.
WORDS = TOKENIZER.model_copy(update={"pattern": r"w\d{2}", "chat_template": TEMPLATE})
WORDS = WORDS.model_copy(update={"words": tuple(f"w{number:02d}" for number in range(len(WORDS.words)))})


class SglangDesk(FakeDesk):
    """Places every call at the server, with what a session's backend says of it."""

    def __init__(self, engine: EngineUnderTest, **knobs: Any) -> None:
        super().__init__(**knobs)
        self._engine = engine

    async def place(self, call: CallRequest) -> Placement:
        url, token = self._engine.url, self._engine.token
        return replace(await super().place(call), url=url, token=token, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_is_recorded_as_the_engine_sampled_it(
    is_stream: bool,
    with_engine: Callable[[Scenario], None],
    engine_under_test: EngineUnderTest,
    reference_logprobs: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    stop_id = write_tokenizer(WORDS, tmp_path).token_to_id(WORDS.stop)
    desk = SglangDesk(engine_under_test, stop_token_ids=(stop_id,), context_length=4096)

    async def scenario(client: HttpEngine, raw: RawHttp) -> None:
        engines = EngineTable()  # the gateway's own clients, not the one of this test
        gateway = GatewayApp(desk=desk, engines=engines)
        await gateway.load_chats({"p": str(tmp_path)})
        with socket.create_server(("127.0.0.1", 0)) as listener:
            gateway.set_base_url(f"http://127.0.0.1:{listener.getsockname()[1]}")
            server = http_server(gateway)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            endpoint = await gateway.admit(admission())
            await converse(endpoint, is_stream=is_stream)
            counts = await gateway.close_episode("g000000-0000-m000", 0)
            server.should_exit = True
            await serving
        await engines.close()
        assert (counts.num_calls, counts.num_failed, counts.num_unusable) == (NUM_TURNS, 0, 0)
        assert counts.num_branches == 0

    with_engine(scenario)
    desk.assert_each_call_ended_once()
    path: tuple[int, ...] = ()
    for invocation_id, request in desk.calls.items():
        sampled = desk.end_of(invocation_id).sampled
        assert request.prompt_ids[: len(path)] == path  # nothing sampled was decoded and encoded again
        path = request.prompt_ids + sampled.token_ids
        assert sampled.version_spans == ((VERSION, 0, len(sampled.token_ids)),)
        expected = reference_logprobs(
            engine_under_test.model_dir, list(path), len(request.prompt_ids), TEMPERATURE
        )
        torch.testing.assert_close(torch.tensor(sampled.logprobs), expected, atol=1e-4, rtol=0)


async def converse(endpoint: Endpoint, *, is_stream: bool) -> None:
    """Some turns of a program that knows OpenAI's API only."""
    messages: list[Any] = []
    async with openai.AsyncOpenAI(
        base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0
    ) as program:
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"w{turn:02d}w01w02"})
            asked: dict[str, Any] = {"model": "coder", "messages": messages, "max_tokens": MAX_TOKENS}
            if is_stream:
                chunks = await program.chat.completions.create(**asked, stream=True)
                text = "".join(
                    [chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]
                )
            else:
                answer = await program.chat.completions.create(**asked)
                text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
