from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.episode import episode_calls
from megloom.compute.store.lineage.text import episode_text
from megloom.compute.store.seal import write_step

EPISODE = "g000001-0000-m000"
V1 = str(Path(__file__).parents[3] / "data" / "meg_v1")


@pytest.fixture
def sealed(tmp_path: Path, build: Any) -> str:
    root = str(tmp_path)
    of: dict[str, Any] = {"episode_id": EPISODE}
    records = [
        build.task("t1"),
        build.episode(EPISODE, attempt=0, state="failed", reward=None),
        build.episode(EPISODE, attempt=1),
        build.episode("g000001-0001-m000"),
        build.invocation(f"{EPISODE}-a0-i000", attempt=0, **of),
        build.invocation(f"{EPISODE}-a1-i001", attempt=1, index=1, version_max=1, **of),
        build.invocation(f"{EPISODE}-a1-i000", attempt=1, index=0, agent="planner", **of),
        build.invocation("g000001-0001-m000-a0-i000", episode_id="g000001-0001-m000"),
        build.edge(f"{EPISODE}-a1-i000", f"{EPISODE}-a1-i001", **of),
        build.edge("g000001-0001-m000-a0-i000", "x", episode_id="g000001-0001-m000"),
    ]
    write_step(Folder(root), "r", 1, records, None, {})
    return root


def test_the_scored_attempt_is_shown_with_its_calls_in_order(sealed: str) -> None:
    found = episode_calls(sealed, "r", EPISODE)
    assert (found.episode.attempt, found.num_attempts, found.task and found.task.prompt) == (
        1,
        2,
        "prompt of t1",
    )
    assert [call.agent for call in found.calls] == ["planner", "solver"]
    assert [(edge.parent, edge.child) for edge in found.edges] == [
        (f"{EPISODE}-a1-i000", f"{EPISODE}-a1-i001")
    ]


@pytest.mark.parametrize("end", ["-a1-i001", "-a1-i001-s"])
def test_the_id_of_a_call_or_a_sample_finds_its_episode(sealed: str, end: str) -> None:
    assert episode_calls(sealed, "r", EPISODE + end).episode.episode_id == EPISODE


def test_the_text_shows_versions_tokens_parents_and_rewards(sealed: str) -> None:
    text = episode_text(episode_calls(sealed, "r", EPISODE))
    line = next(line for line in text.splitlines() if line.startswith("  1 "))
    assert " ".join(line.split()) == "1 solver solver@0 to 1 done 0 data 4 → 3 - seven"


def test_an_unknown_episode_is_refused_with_the_nearest_of_its_step(sealed: str) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no episode g000001-0002-m000 in step 1, did you mean 'g000"
    ):
        episode_calls(sealed, "r", "g000001-0002-m000")
    with pytest.raises(FileNotFoundError, match="no episode nothing in steps 1 to 1"):
        episode_calls(sealed, "r", "nothing")


def test_an_episode_of_schema_1_is_found() -> None:
    found = episode_calls(V1, "old", EPISODE)
    assert [call.agent for call in found.calls] == ["planner", "solver", "solver", "solver", "verifier"]
    assert len(found.edges) == 6
