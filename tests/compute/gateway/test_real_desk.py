"""The gateway with the conductor's own desk: what an answer whose parts disagree leaves in the records."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from megloom.compute.conductor.checks import step_checks
from megloom.compute.conductor.episodes import EndedEpisode, Episode
from megloom.compute.conductor.recording import Attempt, episode_records, with_gateway_calls
from megloom.compute.conductor.samples import candidates
from megloom.compute.gateway.app import GatewayApp
from megloom.compute.gateway.protocol import AgentRoute
from megloom.compute.graph.records import InvocationRecord, SegmentRecord
from megloom.compute.graph.states import InvocationState
from megloom.compute.rollout.protocol import EpisodeOutcome
from megloom.compute.rollout.samples import draw_paths
from tests.compute.conductor.test_gateway_desk import EPISODE, Desks
from tests.compute.gateway.fakes import DEADLINE_S, EngineAsk, FakeEngine, admission, pieces
from tests.compute.gateway.test_calls import MISFITS
from tests.compute.gateway.toys import toy

HI = [{"role": "user", "content": "hi"}]
AGENTS = {"solver": AgentRoute(policy="solver", max_tokens=16, temperature=0.8)}
ATTEMPT = Attempt(
    run="r", step=1, purpose="train", group_id="g000001-0000", task_id="t", member=0, attempt=0,
    reward_hash="h", started_s=0.0, finished_s=2.0,
)  # fmt: skip


async def with_real_desk(directory: Path, why: str, *, stream: bool) -> tuple[list[Any], frozenset[str], Any]:
    """Two turns of an episode, of which the first is a misfit: the vertices, the calls and the counts."""
    chat = toy(directory)

    def script(ask: EngineAsk) -> Any:
        return [(MISFITS[why], "stop")] if len(engine.asks) == 1 else pieces(chat.encode("hello"), "length")

    engine = FakeEngine(script)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        at = Desks(tasks, 1, 1)
        at.engines["solver/0"].context_length = 4096  # type: ignore[misc]
        gateway = GatewayApp(desk=at.desk, engines=lambda _: engine, base_url="http://gateway")
        await gateway.load_chats({"solver": str(directory)})
        endpoint = await gateway.admit(admission(EPISODE, agents=AGENTS))
        headers = {"authorization": f"Bearer {endpoint.token}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gateway.app)) as client:
            messages = list(HI)
            for turn in range(2):
                body = {"model": "solver", "messages": messages, "stream": stream and turn == 0}
                answer = await client.post(
                    f"{endpoint.openai_url}/chat/completions", json=body, headers=headers
                )
                assert answer.status_code == 200
                if body["stream"]:
                    assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
                    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
                    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
                else:
                    texts = [answer.json()["choices"][0]["message"]["content"] or ""]
                said = "".join(texts)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        counts = await gateway.close_episode(EPISODE, 0)
        calls = at.desk.close_attempt(EPISODE)
        at.assert_idle()
        return at.graph.take(EPISODE), calls, counts


@pytest.mark.parametrize("why", MISFITS)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_whose_parts_disagree_is_given_recorded_as_unusable_and_never_trained(
    tmp_path: Path, why: str, stream: bool
) -> None:
    vertices, calls, counts = asyncio.run(with_real_desk(tmp_path, why, stream=stream))
    misfit, sound = vertices
    assert (misfit.state, misfit.failure, misfit.unusable) == (InvocationState.DONE, None, why)
    assert (sound.state, sound.unusable) == (InvocationState.DONE, None)
    assert (counts.num_calls, counts.num_failed, counts.num_unusable) == (2, 0, 1)
    assert counts.problems == (f"solver: {why}",)

    outcome = EpisodeOutcome(episode_id=EPISODE, state="scored", reward=0.5, calls=())
    outcome = with_gateway_calls(outcome, vertices, calls, ())
    records = list(episode_records(ATTEMPT, outcome, vertices))
    first, second = [record for record in records if isinstance(record, InvocationRecord)]
    assert (first.failure, first.reward, first.reward_status) == (why, None, "unscorable")
    assert (second.failure, second.reward, second.reward_status) == (None, 0.5, "inherited")
    segments = {record.segment_id: record for record in records if isinstance(record, SegmentRecord)}
    kept = segments[first.completion_segment or ""]
    assert tuple(kept.token_ids) == MISFITS[why].token_ids
    assert not kept.logprobs and not kept.version_spans

    episode = Episode(
        episode_id=EPISODE, group_id="g", task_id="t", split="train", purpose="train", step=1, epoch=0,
        member=0,
    )  # fmt: skip
    ended = EndedEpisode(episode=episode, outcome=outcome, vertices=vertices)
    (path,) = draw_paths(candidates(ended), seed=0, max_paths=None)
    assert (path.owned, path.num_trainable) == ((second.invocation_id,), second.num_completion_tokens)
    checks = step_checks(ended=[ended], versions={"solver": 3}, lanes={}, reward=(0.5, 1))
    assert all(check.passed for check in checks if check.blocking), "one bad answer must not end the run"
