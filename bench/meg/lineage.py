"""Lineage of a long run: 10 million calls in 1,000 sealed steps, made here, asked in processes of their own.

2,000 episodes a step, each of a planner's, three solvers' and a verifier's call, and every call a sample;
three policies make a version in each step; 50,000 tasks. Token segments are left out, and columns that
lineage does not read are constant; the files and the index are those that a seal writes. Questions are asked
after step 999, where the index is in most parts, and after step 1,000, where it is one block; the worse
figure counts. Making the store is not counted; it lies in a temporary folder. `python bench/meg/lineage.py
[STEPS]` prints one JSON object `{figure: {value, unit, target, ok}}`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megloom.compute.graph.records import MicroBatchRecord, PolicyVersionRecord, ProvenanceRecord
from megloom.compute.graph.schemas import SCHEMAS, to_table
from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.backward import version_lineage
from megloom.compute.store.lineage.compaction import compact
from megloom.compute.store.lineage.forward import task_influence
from megloom.compute.store.seal import write_rows

RUN = "long"
NUM_STEPS, NUM_GROUPS, NUM_MEMBERS = 1_000, 250, 8
AGENTS = ("planner", "solver", "solver", "solver", "verifier")  # of the calls of an episode
NUM_TASKS = 50_000
MICRO_BATCH = 200  # samples
NUM_MAKERS = 2  # processes
NUM_ASKED = 3  # processes for each question; the median of their times counts


def figure(value: float, unit: str, target: float | None = None) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "target": target, "ok": target is None or value <= target}


def lineage_figures(num_steps: int = NUM_STEPS) -> dict[str, dict[str, Any]]:
    """The figures of a run of `num_steps` steps; the targets are meant for 1,000."""
    with tempfile.TemporaryDirectory(prefix="lineage-") as root:
        started = time.perf_counter()
        with ProcessPoolExecutor(NUM_MAKERS, mp_context=get_context("spawn")) as makers:
            sealed = list(makers.map(seal_step, [root] * num_steps, range(num_steps - 1), chunksize=10))
        compact(Folder(root), RUN, num_steps - 2)
        made_s = time.perf_counter() - started
        most_parts = ask(root)
        sealed.append(seal_step(root, num_steps - 1))
        started = time.perf_counter()
        compact(Folder(root), RUN, num_steps - 1)
        compact_s = time.perf_counter() - started
        one_block = ask(root)
    worst = {name: max(value, one_block[name]) for name, value in most_parts.items()}
    return {
        "lineage_calls": figure(num_steps * NUM_GROUPS * NUM_MEMBERS * len(AGENTS), "calls"),
        "backward_s": figure(worst["backward_s"], "s", 1.0),
        "backward_files": figure(worst["backward_files"], "files"),
        "backward_files_at_1000": figure(one_block["backward_files"], "files"),
        "backward_versions": figure(one_block["backward_versions"], "versions"),
        "forward_s": figure(worst["forward_s"], "s", 2.0),
        "forward_files": figure(worst["forward_files"], "files"),
        "forward_versions": figure(one_block["forward_versions"], "versions"),
        "lineage_mib": figure(worst["mib"], "MiB", 1024.0),
        "lineage_num_files": figure(one_block["num_files"], "files"),
        "lineage_compact_s": figure(compact_s, "s"),
        "lineage_made_s": figure(made_s, "s"),
        "lineage_store_mib": figure(sum(sealed) / 2**20, "MiB"),
    }


def ask(root: str) -> dict[str, float]:
    """The medians over fresh processes, peak memory excepted, of which the largest counts."""
    found = []
    for _ in range(NUM_ASKED):
        done = subprocess.run([sys.executable, __file__, "--ask", root], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"asking {root} failed: {done.stderr}")
        found.append(json.loads(done.stdout))
    medians = {name: float(np.median([answer[name] for answer in found])) for name in found[0]}
    return medians | {"mib": max(answer["mib"] for answer in found)}


def _peak_mib() -> float:
    """The largest memory of this process. Not `ru_maxrss`, which a child inherits from its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def answer_here(root: str) -> dict[str, float]:
    """Both questions in this process, from opening the run to the answer."""
    started = time.perf_counter()
    back = version_lineage(root, RUN, "solver", "last")
    backward_s = time.perf_counter() - started
    started = time.perf_counter()
    forward = task_influence(root, RUN, task_ids()[7])
    forward_s = time.perf_counter() - started
    return {
        "backward_s": backward_s,
        "backward_files": back.num_files_opened,
        "backward_versions": len(back.ancestors),
        "forward_s": forward_s,
        "forward_files": forward.num_files_opened,
        "forward_versions": len({(u.policy, u.version) for u in forward.direct}) + len(forward.reached),
        "num_files": back.num_files,
        "mib": _peak_mib(),
    }


def seal_step(root: str, step: int) -> int:
    """Writes one step as the store does; its size in bytes."""
    tables = {
        "episodes": _filled("episodes", _episodes(step)),
        "invocations": _filled("invocations", _calls(step)),
        "samples": _filled("samples", _samples(step)),
        "micro_batches": to_table("micro_batches", _micro_batches(step)),
        "policy_versions": to_table("policy_versions", _versions(step)),
    }
    if step == 0:
        ids = task_ids()
        tables["tasks"] = _filled("tasks", {"task_id": ids, "prompt": [f"What is {i}?" for i in ids]})
        tables["provenance"] = to_table("provenance", [_provenance()])
    rows = {table: arrow.to_batches() for table, arrow in tables.items()}
    manifest = write_rows(Folder(root), RUN, step, rows, step - 1 if step else None, {})
    return sum(file.size_bytes for file in manifest.files)


@lru_cache(maxsize=1)
def task_ids() -> list[str]:
    return [blake2b(str(number).encode(), digest_size=8).hexdigest() for number in range(NUM_TASKS)]


@lru_cache(maxsize=1)
def _task_array() -> pa.Array:
    return pa.array(task_ids())


@lru_cache(maxsize=1)
def _endings() -> dict[str, pa.Array]:
    """The ids of a step without their step, one entry a call."""
    calls = range(len(AGENTS))
    of_group = [f"-{group:04d}" for group in range(NUM_GROUPS)]
    of_episode = [f"{group}-m{member:03d}" for group in of_group for member in range(NUM_MEMBERS)]
    return {
        "group": pa.array([group for group in of_group for _ in range(NUM_MEMBERS * len(AGENTS))]),
        "episode": pa.array([episode for episode in of_episode for _ in calls]),
        "call": pa.array([f"{episode}-a0-i{index:03d}" for episode in of_episode for index in calls]),
        "agent": pa.array([agent for _ in of_episode for agent in AGENTS]),
    }


def _ids(step: int, kind: str, ending: str = "") -> pa.Array:
    return pc.binary_join_element_wise(f"g{step:06d}", _endings()[kind], ending, "")


def _tasks(step: int, calls_a_row: int) -> pa.Array:
    """The task of each episode, or of each call."""
    rng = np.random.default_rng(step)
    drawn = rng.integers(0, NUM_TASKS, NUM_GROUPS).repeat(NUM_MEMBERS * calls_a_row)
    return _task_array().take(pa.array(drawn))


def _calls(step: int) -> dict[str, Any]:
    return {
        "invocation_id": _ids(step, "call"),
        "episode_id": _ids(step, "episode"),
        "group_id": _ids(step, "group"),
        "task_id": _tasks(step, len(AGENTS)),
        "step": step,
        "agent": _endings()["agent"],
        "policy": _endings()["agent"],
        "version_min": step,
        "version_max": step,
        "text": "an answer",
        "state": "done",
    }


def _samples(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "sample_id": _ids(step, "call", "-s"),
        "invocation_id": _ids(step, "call"),
        "episode_id": _ids(step, "episode"),
        "group_id": _ids(step, "group"),
        "task_id": _tasks(step, len(AGENTS)),
        "step": step,
        "kind": "rollout",
        "agent": _endings()["agent"],
        "policy": _endings()["agent"],
        "advantage": rng.normal(size=NUM_GROUPS * NUM_MEMBERS * len(AGENTS)),
        "reward": 1.0,
        "version_min": step,
        "version_max": step,
        "state": "applied",
    }


def _episodes(step: int) -> dict[str, Any]:
    return {
        "episode_id": _ids(step, "episode").take(pa.array(range(0, len(_endings()["call"]), len(AGENTS)))),
        "task_id": _tasks(step, 1),
        "step": step,
        "purpose": "train",
        "state": "scored",
        "reward": 1.0,
        "reward_status": "scored",
        "reward_hash": "9364eda117730385",
        "metrics": "{}",
    }


def _micro_batches(step: int) -> list[MicroBatchRecord]:
    batches = []
    ids, agents = _ids(step, "call", "-s").to_pylist(), _endings()["agent"].to_pylist()
    for policy in dict.fromkeys(AGENTS):
        own = [name for name, agent in zip(ids, agents, strict=True) if agent == policy]
        for position, first in enumerate(range(0, len(own), MICRO_BATCH)):
            batches.append(
                MicroBatchRecord(
                    micro_batch_id=f"{policy}-s{step:06d}-b{position:04d}", run=RUN, step=step, policy=policy,
                    position=position, cell=f"trainer/{policy}", base_version=step,
                    sample_ids=own[first : first + MICRO_BATCH], num_tokens=0, num_trainable=0, loss_sum=0.0,
                    started_s=0.0, finished_s=0.0,
                )
            )  # fmt: skip
    return batches


def _versions(step: int) -> list[PolicyVersionRecord]:
    made = [(policy, step + 1) for policy in dict.fromkeys(AGENTS)]
    if step == 0:
        made += [(policy, 0) for policy, _ in made]
    return [
        PolicyVersionRecord(
            run=RUN, policy=policy, version=version, parent_version=version - 1 if version else None,
            step=step, kind="train" if version else "initial", uri=f"weights/{policy}/v{version:06d}",
            digest="0" * 64, num_samples=0, num_trainable=0, num_optimizer_steps=1, loss=0.0, grad_norm=1.0,
            config_hash="c", code_hash="k", reward_hash="9364eda117730385", created_at="",
        )
        for policy, version in made
    ]  # fmt: skip


def _provenance() -> ProvenanceRecord:
    return ProvenanceRecord(
        run=RUN, epoch=1, step=0, workload="bench:workload", config_hash="c", config="{}", code_hash="k",
        code_hashes="{}", reward_hash="9364eda117730385", packages="{}", started_at="",
    )  # fmt: skip


_CONSTANTS = {pa.string(): "", pa.int64(): 0, pa.float64(): 0.0, pa.bool_(): True}


def _filled(table: str, columns: dict[str, Any]) -> pa.Table:
    """The columns as a table of the schema: scalars are repeated, other columns null or constant."""
    num_rows = max(len(c) for c in columns.values() if isinstance(c, (pa.Array, list, np.ndarray)))
    arrays = []
    for field in SCHEMAS[table]:
        value = columns.get(field.name, RUN if field.name == "run" else None)
        if value is None:
            value = None if field.nullable else _CONSTANTS[field.type]
        if isinstance(value, (pa.Array, list, np.ndarray)):
            arrays.append(pa.array(value, field.type))
        else:
            arrays.append(pa.repeat(pa.scalar(value, field.type), num_rows))
    return pa.Table.from_arrays(arrays, schema=SCHEMAS[table])


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["--ask"]:
        print(json.dumps(answer_here(argv[1])))
    else:
        print(json.dumps(lineage_figures(int(argv[0]) if argv else NUM_STEPS), indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
