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
    trained = [call for call in calls if call.episode_id.startswith("g")]
    assert len({call.episode_id for call in trained}) == 16
    assert any(edge.kind == "extends" for edge in edges)
    for call in trained:
        check_tokens(call, segments)
    version = next(v for v in rows("policy_versions") if v.policy == "coder")
    assert version.num_samples > 0 and math.isfinite(version.grad_norm) and version.grad_norm > 0
    owned = [name for s in samples for name in s.invocation_ids]
    assert len(owned) == len(set(owned)) and len(owned) > len(samples)


def check_tokens(call: Any, segments: dict[str, SegmentRecord]) -> None:
    """Ids, log-probabilities and versions of an answer agree; its path begins with its prompt."""
    if call.completion_segment is None:
        return
    answer = segments[call.completion_segment]
    assert len(answer.token_ids) == len(answer.logprobs or ()) == call.num_completion_tokens
    assert [end for _, _, end in answer.version_spans or ()][-1] == len(answer.token_ids)
    prompt = path_tokens(segments, call.prompt_segment)
    assert path_tokens(segments, answer.segment_id) == prompt + answer.token_ids
