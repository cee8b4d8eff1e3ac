"""One training step against real SGLang: it samples, the trainer takes the gradient, it serves the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megloom.compute.engines.client import HttpEngine
from megloom.compute.engines.protocol import Completion, GenerateRequest, PauseMode
from megloom.compute.trainers.protocol import MicroBatch, Published, TrainingRow
from megloom.compute.trainers.replica import Replica
from megloom.compute.workload import RandomModel, Tokenizer
from tests.compute.engines.conftest import VOCAB_SIZE, RawHttp, Scenario
from tests.compute.trainers.builders import plan
from tests.sglang.conftest import ARCHITECTURE, POLICY

pytestmark = [
    pytest.mark.usefixtures("sglang_python"),  # first of all: without SGLang nothing else is set up
    pytest.mark.filterwarnings("error"),
    pytest.mark.timeout(900),  # the first test starts the server
]

TEMPERATURE = 0.8
MAX_GAP = 1e-4  # nats; measured 5e-6: both compute in float32, in another order
NUM_PROMPTS, NUM_SAMPLED, NUM_LONG = 6, 24, 400
SPECIAL = ("<user>", "<assistant>", "<end>")
TOKENIZER = Tokenizer(
    words=tuple(f"w{index}" for index in range(VOCAB_SIZE - len(SPECIAL))),
    special=SPECIAL,
    pattern=r"\S+",
    chat_template="{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>",
    stop="<end>",
)

Ask = Callable[..., GenerateRequest]


def trainer() -> Replica:
    """A trainer of the architecture that the server was started with."""
    source = RandomModel(architecture="qwen3", config=ARCHITECTURE, tokenizer=TOKENIZER)
    return Replica(plan(policy=POLICY, model=source.model_dump()))


def as_row(request: GenerateRequest, completion: Completion, advantage: float) -> TrainingRow:
    num_prompt, num_sampled = len(request.token_ids), len(completion.token_ids)
    return TrainingRow(
        sample_id=request.rid,
        token_ids=np.array([*request.token_ids, *completion.token_ids], np.int32),
        loss_mask=np.array([0] * num_prompt + [1] * num_sampled, np.uint8),
        logprobs=np.array([0.0] * num_prompt + list(completion.logprobs), np.float32),
        advantage=advantage,
        weight=1.0,
        temperature=TEMPERATURE,
    )


async def sample(client: HttpEngine, make_request: Ask, first: int) -> list[TrainingRow]:
    """Rows of one batch of prompts, with advantages of both signs."""
    requests = [
        make_request(
            index,
            token_ids=tuple((index * k) % VOCAB_SIZE for k in range(1, 4 + index % 5)),
            max_tokens=NUM_SAMPLED,
            temperature=TEMPERATURE,
        )
        for index in range(first, first + NUM_PROMPTS)
    ]
    completions = await asyncio.gather(*map(client.generate, requests))
    return [
        as_row(request, completion, 1.0 if index % 2 else -0.5)
        for index, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]


async def swap(client: HttpEngine, published: Published) -> None:
    """Puts a published version behind the requests that are running."""
    await client.pause(PauseMode.RETRACT)
    await client.load_version(published.uri, published.version, None)
    await client.resume()


def gap(replica: Replica, name: str, rows: list[TrainingRow]) -> float:
    """The largest |trainer's - behaviour logprob| of the rows; takes their gradient."""
    report = replica.forward_backward(
        MicroBatch(micro_batch_id=name, loss="policy_gradient", rows=tuple(rows))
    )
    assert report.num_trainable == NUM_PROMPTS * NUM_SAMPLED
    assert report.max_logprob_gap is not None
    return report.max_logprob_gap


def test_what_sglang_samples_is_trained_on_and_the_new_version_is_served_and_stamped(
    with_engine: Callable[[Scenario], None], make_request: Ask, tmp_path: Path
) -> None:
    replica = trainer()
    weights_dir = str(tmp_path / POLICY)
    old = replica.create(weights_dir)
    replica.load(weights_uri=old.uri, state_path=None)

    async def scenario(client: HttpEngine, raw: RawHttp) -> None:
        await swap(client, old)
        before = await sample(client, make_request, first=1)
        assert gap(replica, "before", before) < MAX_GAP

        update = replica.optim_step(scale=1.0 / (NUM_PROMPTS * NUM_SAMPLED))
        assert update.grad_norm > 0
        new = replica.publish(weights_dir=weights_dir, version=old.version + 1)

        long = make_request(99, max_tokens=NUM_LONG, temperature=TEMPERATURE)
        in_flight = asyncio.create_task(client.generate(long))
        await raw.start_counting()
        await raw.wait_until("generation_tokens_total", lambda tokens: tokens >= 5)
        await swap(client, new)
        first_span, second_span = (await in_flight).version_spans
        assert (first_span.version, second_span.version) == (old.version, new.version)
        assert (first_span.start, first_span.end, second_span.end) == (0, second_span.start, NUM_LONG)

        after = await sample(client, make_request, first=201)
        assert gap(replica, "after", after) < MAX_GAP
        replica.optim_step(scale=1.0)
        assert gap(replica, "moved", after) > 10 * MAX_GAP  # so the gap above tells one version from the next

    with_engine(scenario)


def test_a_row_of_another_temperature_would_be_noticed(
    with_engine: Callable[[Scenario], None], make_request: Ask, tmp_path: Path
) -> None:
    replica = trainer()
    old = replica.create(str(tmp_path / POLICY))
    replica.load(weights_uri=old.uri, state_path=None)

    async def scenario(client: HttpEngine, raw: RawHttp) -> None:
        await swap(client, old)
        rows = await sample(client, make_request, first=301)
        wrong: list[Any] = [
            TrainingRow(
                sample_id=row.sample_id,
                token_ids=row.token_ids,
                loss_mask=row.loss_mask,
                logprobs=row.logprobs,
                advantage=row.advantage,
                weight=row.weight,
                temperature=1.0,
            )
            for row in rows
        ]
        assert gap(replica, "wrong", wrong) > 100 * MAX_GAP

    with_engine(scenario)
