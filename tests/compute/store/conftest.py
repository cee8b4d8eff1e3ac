"""Builders of records with keyword overrides, for the store's tests."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
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
            "invocation_ids": ["i1"],
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


BUCKET = "meg-tests"


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a real S3 server, a process of its own on a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "moto_server does not answer"
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


def bucket_of(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An existing bucket; the environment holds its server's address and keys that it takes."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = fsspec.filesystem("s3")
    if not bucket.exists(BUCKET):
        bucket.mkdir(BUCKET)
    return f"s3://{BUCKET}"


@pytest.fixture
def s3_bucket(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    return bucket_of(s3_url, monkeypatch)


@pytest.fixture
def strict_s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on a server of its own, whose access rules a test may change."""
    s3 = fsspec.get_filesystem_class("s3")
    with s3_server() as url:
        s3.clear_instance_cache()  # the others' keep their server's address
        yield bucket_of(url, monkeypatch)
        s3.clear_instance_cache()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"no small disk: {error}")
    if done.returncode:
        pytest.skip(f"no small disk: mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(params=["local", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    """An empty store root: on disk, in fsspec's memory, in a bucket."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_bucket')}{tmp_path}"
    return str(tmp_path / "store") if request.param == "local" else f"memory:/{tmp_path}"
