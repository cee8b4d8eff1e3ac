"""An unmodified coding agent trains: real programs, real engine, real gateway, and a gradient from them."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.graph.paths import path_tokens
from megloom.compute.graph.records import SegmentRecord
from megloom.compute.graph.schemas import from_table
from megloom.compute.store.reader import MegReader
from tests.test_training import finished, megloom
from tests.test_training import place as place  # the fixture

RUN = "coding"
SETTINGS = ("training.eval_tasks=1", "training.warm_examples=4096", "training.tasks_per_step=4")
missing = importlib.util.find_spec("minisweagent") is None


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(missing, reason="mini-swe-agent is not installed: pip install 'megloom[harness]'")
def test_episodes_of_an_unmodified_program_are_recorded_scored_and_trained_on(place: Path) -> None:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    output = finished(
        megloom(place, "train", "coding_harness", "--steps", "1", "--run", RUN, *words), within_s=450
    )
    assert "train pipeline=coding_harness steps=1" in output
    reader = MegReader(str(place / "home" / "store"))

    def rows(table: str) -> list[Any]:
        return from_table(table, reader.read_table(RUN, table, [1]))

    calls, edges, samples = rows("invocations"), rows("edges"), rows("samples")
    segments = {segment.segment_id: segment for segment in rows("segments")}
    episodes = {episode.episode_id: episode for episode in rows("episodes") if episode.purpose == "train"}
    assert len(episodes) == 16
    assert {(e.state, e.reward_status, e.failure) for e in episodes.values()} == {("scored", "scored", None)}
    assert all(math.isfinite(episode.reward) for episode in episodes.values())
    trained = {call.invocation_id: call for call in calls if call.episode_id in episodes}
    assert {call.episode_id for call in trained.values()} == set(episodes), "each has at least one answer"
    for call in trained.values():
        check_tokens(call, segments)
    extends = [edge for edge in edges if edge.kind == "extends" and edge.episode_id in episodes]
    assert extends
    for edge in extends:
        check_extends(edge, trained, segments)
    version = next(v for v in rows("policy_versions") if v.policy == "coder")
    assert version.num_samples > 0 and math.isfinite(version.grad_norm) and version.grad_norm > 0
    owned = [name for s in samples for name in s.invocation_ids]
    assert len(owned) == len(set(owned)) and len(owned) > len(samples)


def check_tokens(call: Any, segments: dict[str, SegmentRecord]) -> None:
    """The call was answered; ids, log-probabilities and versions of the answer agree, after its prompt."""
    assert call.state == "done" and call.completion_segment is not None, (call.invocation_id, call.failure)
    answer = segments[call.completion_segment]
    assert answer.sampled and 0 < len(answer.token_ids) == call.num_completion_tokens
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    assert all(math.isfinite(value) and value <= 0 for value in answer.logprobs)
    bounds = [0, *(end for _, _, end in answer.version_spans or ())]
    assert [start for _, start, _ in answer.version_spans or ()] == bounds[:-1]
    assert bounds[-1] == len(answer.token_ids)
    prompt = path_tokens(segments, call.prompt_segment)
    assert len(prompt) == call.num_prompt_tokens > 0
    assert path_tokens(segments, answer.segment_id) == prompt + answer.token_ids


def check_extends(edge: Any, calls: dict[str, Any], segments: dict[str, SegmentRecord]) -> None:
    """The child's prompt begins with what its parent read and wrote."""
    parent, child = calls[edge.parent], calls[edge.child]
    assert parent.episode_id == child.episode_id == edge.episode_id
    before = path_tokens(segments, parent.prompt_segment) + segments[parent.completion_segment].token_ids
    prompt = path_tokens(segments, child.prompt_segment)
    assert len(prompt) > len(before) and prompt[: len(before)] == before, (edge.parent, edge.child)
