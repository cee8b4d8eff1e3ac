from __future__ import annotations

from itertools import pairwise
from typing import Any

from megloom.compute.report.episode import episode_graph


def test_every_call_shows_its_agent_version_tokens_text_and_reward(parsed: Any, make: Any) -> None:
    texts = parsed(episode_graph(make.story())).texts
    for part in ("planner #0", "solver #2", "verifier@3", "11 → 5 tokens", "answer 3", "reward 0"):
        assert part in texts


def test_agents_are_lanes_in_the_order_of_their_first_call(parsed: Any, make: Any) -> None:
    texts = parsed(episode_graph(make.story())).texts
    assert [t for t in texts if t in ("planner", "solver", "verifier")] == ["planner", "solver", "verifier"]


def test_every_edge_is_an_arrow_and_an_order_edge_is_dashed(parsed: Any, make: Any) -> None:
    picture = parsed(episode_graph(make.story()))
    arrows = [p for p in picture.all("path") if "marker-end" in p.attrib]
    # four edges, the task to the one root, the last call and the chosen one to the result
    assert len(arrows) == 7
    assert sum("stroke-dasharray" in a.attrib for a in arrows) == 1
    assert sum("meg-chosen" in a.attrib["marker-end"] for a in arrows) == 1


def test_a_call_stands_right_of_its_parents(parsed: Any, make: Any) -> None:
    picture = parsed(episode_graph(make.story()))
    x = {node.text: float(node.attrib["x"]) for node in picture.all("text")}
    assert x["planner #0"] < x["solver #1"] == x["solver #2"] < x["verifier #3"]


def test_calls_that_share_lane_and_column_do_not_overlap(parsed: Any, make: Any) -> None:
    calls = [make.call(n, "solver") for n in range(6)]
    picture = parsed(episode_graph(make.story(calls=calls, edges=[], chosen=None)))
    tops = [float(t.attrib["y"]) for t in picture.all("text") if (t.text or "").startswith("solver #")]
    assert all(later - earlier > 100 for earlier, later in pairwise(tops))
    assert max(tops) < picture.height


def test_the_chosen_call_is_marked(parsed: Any, make: Any) -> None:
    assert parsed(episode_graph(make.story())).texts.count("chosen") == 1
    assert "chosen" not in parsed(episode_graph(make.story(chosen=None))).texts
    assert "chosen" not in parsed(episode_graph(make.story(chosen="gone"))).texts


def test_a_failed_call_shows_its_failure_instead_of_a_text(parsed: Any, make: Any) -> None:
    calls = [
        make.call(0, "planner", text="", failure="engine lost", state="failed", reward=None, version_min=None)
    ]
    texts = parsed(episode_graph(make.story(calls=calls, edges=[]))).texts
    assert {"engine lost", "failed"} <= set(texts)


def test_an_episode_that_failed_before_its_first_call_is_drawn(parsed: Any, make: Any) -> None:
    story = make.story(
        episode=make.episode(state="failed", failure="reward timed out", reward=None),
        calls=[],
        edges=[],
        result=None,
        chosen=None,
    )
    assert "reward timed out" in parsed(episode_graph(story)).texts


def test_an_edge_to_a_call_that_is_not_shown_is_left_out(parsed: Any, make: Any) -> None:
    story = make.story(edges=[make.edge(0, 9), make.edge(8, 1)])
    parsed(episode_graph(story))


def test_the_whole_text_is_in_the_tooltip(parsed: Any, make: Any) -> None:
    long = "word " * 100
    picture = parsed(episode_graph(make.story(calls=[make.call(0, "planner", text=long)], edges=[])))
    assert any(long in title for title in picture.titles)


def test_texts_with_markup_are_escaped(parsed: Any, make: Any, evil: str) -> None:
    calls = [make.call(0, evil, text=evil, policy=evil), make.call(1, "b", failure=evil)]
    story = make.story(calls=calls, edges=[], prompt=evil, expected=evil, result=evil)
    assert parsed(episode_graph(story)).all("script") == []
