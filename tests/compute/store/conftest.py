"""Builders of records with keyword overrides, for the store's tests."""

from __future__ import annotations

from typing import Any

import pytest

from megloom.compute.graph.records import (
    EdgeRecord,
    EpisodeRecord,
    InvocationRecord,
    MicroBatchRecord,
    PolicyVersionRecord,
    SampleRecord,
    SegmentRecord,
    TaskRecord,
)


class Build:
    """Each method gives a complete record; ids default to small names."""

    def task(self, task_id: str = "t1", **overrides: Any) -> TaskRecord:
        values: dict[str, Any] = {
            "split": "train",
            "position": 0,
            "prompt": f"prompt of {task_id}",
            "ground_truth": "7",
        }
        return TaskRecord(**({"task_id": task_id, "data_source": "hand", "row": "{}"} | values | overrides))

    def edge(self, parent: str = "a", child: str = "b", **overrides: Any) -> EdgeRecord:
        values: dict[str, Any] = {"episode_id": "e1", "run": "r", "step": 1, "kind": "data"}
        return EdgeRecord(**(values | {"parent": parent, "child": child} | overrides))

    def edges(self, num: int, **overrides: Any) -> list[EdgeRecord]:
        return [self.edge(f"a{index:05d}", "b", **overrides) for index in range(num)]

    def segment(self, segment_id: str = "s1", **overrides: Any) -> SegmentRecord:
        values: dict[str, Any] = {
            "episode_id": "e1",
            "run": "r",
            "step": 1,
            "policy": "solver",
            "parent": None,
            "start": 0,
            "sampled": True,
            "token_ids": [5, 6, 7],
            "logprobs": [-0.5, -0.25, -1.0],
            "version_spans": [[0, 0, 2], [1, 2, 3]],
        }
        return SegmentRecord(**(values | {"segment_id": segment_id} | overrides))

    def episode(self, episode_id: str = "e1", **overrides: Any) -> EpisodeRecord:
        values: dict[str, Any] = {
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
            "started_s": 0.0,
            "finished_s": 1.0,
        }
        return EpisodeRecord(**(values | {"episode_id": episode_id} | overrides))

    def invocation(self, invocation_id: str = "i1", **overrides: Any) -> InvocationRecord:
        values: dict[str, Any] = {
            "episode_id": "e1",
            "run": "r",
            "step": 1,
            "task_id": "t1",
            "group_id": "g1",
            "member": 0,
            "attempt": 0,
            "agent": "solver",
            "policy": "solver",
            "index": 0,
            "num_reentries": 0,
            "state": "done",
            "version_min": 0,
            "version_max": 0,
            "cell": "cell-0",
            "engine": "cell-0#1",
            "registered_s": 0.0,
            "ready_s": 0.0,
            "started_s": None,
            "finished_s": 1.0,
            "prompt_segment": None,
            "completion_segment": None,
            "message": None,
            "num_prompt_tokens": 4,
            "num_completion_tokens": 3,
            "finish_reason": "stop",
            "seed": 7,
            "temperature": 1.0,
            "max_tokens": 8,
            "text": "seven",
            "reward": None,
            "reward_status": "scored",
            "failure": None,
        }
        return InvocationRecord(**(values | {"invocation_id": invocation_id} | overrides))

    def sample(self, sample_id: str = "x1", **overrides: Any) -> SampleRecord:
        values: dict[str, Any] = {
            "run": "r",
            "step": 1,
            "kind": "rollout",
            "policy": "solver",
            "agent": "solver",
            "group_id": "g1",
            "episode_id": "e1",
            "invocation_id": "i1",
            "task_id": "t1",
            "leaf_segment": "s1",
            "num_tokens": 7,
            "num_trainable": 3,
            "reward": 1.0,
            "advantage": 0.5,
            "version_min": 0,
            "version_max": 0,
            "micro_batch_id": "m1",
            "state": "applied",
        }
        return SampleRecord(**(values | {"sample_id": sample_id} | overrides))

    def micro_batch(self, micro_batch_id: str = "m1", **overrides: Any) -> MicroBatchRecord:
        values: dict[str, Any] = {
            "run": "r",
            "step": 1,
            "policy": "solver",
            "position": 0,
            "cell": "cell-1",
            "base_version": 0,
            "sample_ids": ["x1"],
            "num_tokens": 7,
            "num_trainable": 3,
            "loss_sum": 0.1,
            "started_s": 1.0,
            "finished_s": 2.0,
        }
        return MicroBatchRecord(**(values | {"micro_batch_id": micro_batch_id} | overrides))

    def version(self, policy: str = "solver", version: int = 1, **overrides: Any) -> PolicyVersionRecord:
        values: dict[str, Any] = {
            "run": "r",
            "parent_version": version - 1 if version else None,
            "step": version,
            "kind": "update" if version else "initial",
            "uri": f"weights/{policy}/v{version:06d}",
            "digest": "d",
            "num_samples": 1,
            "num_trainable": 3,
            "num_optimizer_steps": 1,
            "loss": 0.1,
            "grad_norm": 1.5,
            "config_hash": "c",
            "code_hash": "k",
            "reward_hash": "h",
            "created_at": "2026-01-01T00:00:00Z",
        }
        return PolicyVersionRecord(**(values | {"policy": policy, "version": version} | overrides))


@pytest.fixture
def build() -> Build:
    return Build()


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    """An empty store root, on disk and in fsspec's memory."""
    return str(tmp_path / "store") if request.param == "local" else f"memory:/{tmp_path}"
