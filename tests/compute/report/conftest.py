"""Builders of what the pictures show, and a check that markup is well-formed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from megloom.compute.graph.records import CellIntervalRecord, EdgeRecord, EpisodeRecord, InvocationRecord
from megloom.compute.report.episode import EpisodeStory

EVIL = '<script>alert("x")</script> & \x00 \ud800 ü ]]>'


class Picture:
    """A parsed SVG."""

    def __init__(self, markup: str) -> None:
        self.root = ElementTree.fromstring(markup)
        self.width, self.height = (float(v) for v in self.root.attrib["viewBox"].split()[2:])

    def all(self, tag: str) -> list[ElementTree.Element]:
        return [node for node in self.root.iter() if node.tag.rpartition("}")[2] == tag]

    @property
    def texts(self) -> list[str]:
        return [node.text or "" for node in self.all("text")]

    @property
    def titles(self) -> list[str]:
        return [node.text or "" for node in self.all("title")]


@pytest.fixture
def parsed() -> Callable[[str], Picture]:
    return Picture


@pytest.fixture
def evil() -> str:
    """Text that breaks markup which does not escape it: tags, quotes, a control character, a surrogate."""
    return EVIL


class Make:
    def interval(self, cell: str = "cell-0", start_s: float = 0.0, **overrides: Any) -> CellIntervalRecord:
        values: dict[str, Any] = {
            "run": "r",
            "step": 1,
            "role": "ROLL(solver)",
            "policy": "solver",
            "activity": "roll",
        }
        end: dict[str, Any] = {"end_s": start_s + 1.0}
        return CellIntervalRecord(**(values | {"cell": cell, "start_s": start_s} | end | overrides))

    def call(self, index: int, agent: str, **overrides: Any) -> InvocationRecord:
        values: dict[str, Any] = {
            "invocation_id": f"i{index}",
            "episode_id": "e1",
            "run": "r",
            "step": 1,
            "task_id": "t1",
            "group_id": "g1",
            "member": 0,
            "attempt": 0,
            "policy": agent,
            "num_reentries": 0,
            "state": "done",
            "version_min": 3,
            "version_max": 3,
            "cell": None,
            "engine": None,
            "registered_s": 0.0,
            "ready_s": None,
            "started_s": None,
            "finished_s": None,
            "prompt_segment": None,
            "completion_segment": None,
            "message": None,
            "num_prompt_tokens": 11,
            "num_completion_tokens": 5,
            "finish_reason": "stop",
            "seed": 1,
            "temperature": 1.0,
            "max_tokens": 8,
            "text": f"answer {index}",
            "reward": 1.0,
            "reward_status": "scored",
            "failure": None,
        }
        return InvocationRecord(**(values | {"index": index, "agent": agent} | overrides))

    def edge(self, parent: int, child: int, kind: str = "data") -> EdgeRecord:
        ends: dict[str, Any] = {"parent": f"i{parent}", "child": f"i{child}"}
        return EdgeRecord(episode_id="e1", run="r", step=1, kind=kind, **ends)

    def episode(self, **overrides: Any) -> EpisodeRecord:
        values: dict[str, Any] = {
            "episode_id": "e1",
            "group_id": "g1",
            "run": "r",
            "step": 1,
            "task_id": "t1",
            "purpose": "train",
            "member": 0,
            "attempt": 0,
            "state": "scored",
            "reward": 1.0,
            "reward_status": "scored",
            "reward_hash": "h",
            "metrics": "{}",
            "failure": None,
            "failure_boundary": None,
            "started_s": 1.0,
            "finished_s": 2.5,
        }
        return EpisodeRecord(**(values | overrides))

    def story(self, **overrides: Any) -> EpisodeStory:
        """A planner, two solvers that read it, a verifier that reads both solvers."""
        values: dict[str, Any] = {
            "episode": self.episode(),
            "calls": [
                self.call(0, "planner"),
                self.call(1, "solver"),
                self.call(2, "solver", reward=0.0),
                self.call(3, "verifier", reward=None),
            ],
            "edges": [self.edge(0, 1), self.edge(0, 2), self.edge(1, 3), self.edge(2, 3, "order")],
            "prompt": "3 + 4 =",
            "expected": "7",
            "result": "7",
            "chosen": "i1",
        }
        return EpisodeStory(**(values | overrides))


@pytest.fixture
def make() -> Make:
    return Make()
