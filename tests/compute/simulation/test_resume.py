"""A session that dies inside a step goes on where it was: ended episodes stand, the numbers stay the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.recording import Attempt, episode_records
from megloom.compute.conductor.restoring import ended_episodes
from megloom.compute.graph.records import EpisodeRecord
from megloom.compute.graph.schemas import from_table
from megloom.compute.simulation.run import Simulated, simulate
from megloom.compute.simulation.team import simulated_team
from megloom.compute.store.errors import StoreError, TokensDropped
from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.store import MegStore
from megloom.compute.workload import Training


class DyingStore(MegStore):
    """Fails at the n-th episode that it records, or when a step is sealed: the session ends there."""

    def __init__(self, *, episodes: int | None = None, seal: int | None = None, **store: Any) -> None:
        super().__init__(**store)
        self._episodes, self._seal = episodes, seal

    def record(self, record: Any, *, step: int | None = None) -> None:
        super().record(record, step=step)
        if isinstance(record, EpisodeRecord) and self._episodes is not None:
            self._episodes -= 1
            if self._episodes == 0:
                raise StoreError("the session dies here")

    async def seal(self, run: str, step: int, snapshot: Any = None) -> Any:
        if step == self._seal:
            raise StoreError("the session dies here")
        return await super().seal(run, step, snapshot)


def session(store: MegStore, *, num_tasks: int = 8, steps: int = 3, **settings: Any) -> Simulated:
    training = Training(tasks_per_step=3, group_size=2, micro_batch_groups=1)
    config = SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": "sim",
            "steps": steps,
            "lease_s": 1e9,
            "training": {"eval_tasks": 2},
            **settings,
        }
    )
    return simulate(simulated_team(training), config, store=store, num_tasks=num_tasks)


def store_on(root: Path, journal: MemoryJournal, **death: Any) -> MegStore:
    return DyingStore(root=str(root), journal=journal, offload=InlineOffload(), **death)


def rows(root: Path, table: str, *names: str) -> list[tuple[Any, ...]]:
    found = from_table(table, MegReader(str(root)).read_table("sim", table))
    return sorted(tuple(getattr(record, name) for name in names) for record in found)


TEAM = ("planner", "solver", "verifier")


def trained_tasks(root: Path) -> Counter[Any]:
    return Counter(rows(root, "groups", "epoch", "task_id"))


def restored_episodes(simulated: Simulated) -> int:
    events = [json.loads(line) for line in simulated.events]
    return sum(event.get("episodes", 0) for event in events if event["kind"] == "restored")


@pytest.mark.parametrize(
    ("death", "num_restored"),
    [
        # 4 evaluation episodes in step 0 (2 tasks, 2 draws), then 6 training episodes a step.
        ({"episodes": 2}, 0),
        ({"episodes": 4 + 1}, 1),
        ({"episodes": 4 + 6 + 4}, 4),
        ({"seal": 2}, 6),
        ({"seal": 0}, 0),
    ],
)
def test_a_session_that_dies_keeps_its_ended_episodes_and_ends_with_the_same_samples(
    tmp_path: Path, death: dict[str, int], num_restored: int
) -> None:
    straight = session(store_on(tmp_path / "straight", MemoryJournal()))
    journal = MemoryJournal()
    first = session(store_on(tmp_path / "broken", journal, **death))
    assert (first.state, first.failure) == ("failed", "StoreError: the session dies here")
    second = session(store_on(tmp_path / "broken", journal))
    assert (straight.state, second.state) == ("finished", "finished")
    assert restored_episodes(second) == num_restored
    for table, names in (
        ("groups", ("group_id", "epoch", "task_id", "num_scored")),
        ("samples", ("sample_id", "advantage", "reward", "state", "num_tokens")),
        ("segments", ("segment_id", "token_ids", "logprobs")),
        ("policy_versions", ("policy", "version", "parent_version", "num_samples")),
    ):
        assert rows(tmp_path / "broken", table, *names) == rows(tmp_path / "straight", table, *names), table


def test_a_run_that_goes_on_over_another_dataset_is_refused_and_its_records_stay(tmp_path: Path) -> None:
    journal = MemoryJournal()
    session(store_on(tmp_path, journal, episodes=4 + 6 + 4))
    before = dict(journal.open_steps())
    other = session(store_on(tmp_path, journal), num_tasks=9)
    assert other.state == "failed" and other.failure is not None
    assert other.failure.startswith("SessionError: run sim was made on tasks ")
    assert dict(journal.open_steps()) == before
    assert restored_episodes(session(store_on(tmp_path, journal))) == 4


def test_a_restored_episode_is_what_was_recorded(tmp_path: Path) -> None:
    session(store_on(tmp_path, MemoryJournal()), steps=1)
    reader = MegReader(str(tmp_path))
    tables = ("episodes", "invocations", "edges", "segments", "messages")
    records = [row for table in tables for row in from_table(table, reader.read_table("sim", table, [1]))]
    versions = {"planner": 0, "solver": 0, "verifier": 0}
    restored = ended_episodes(records, step=1, versions=versions, needs={})
    episodes = {r.episode_id: r for r in records if isinstance(r, EpisodeRecord) and r.purpose == "train"}
    assert set(restored) == set(episodes) and len(restored) == 6
    for episode_id, again in restored.items():
        old = episodes[episode_id]
        attempt = Attempt(
            run=old.run,
            step=old.step,
            purpose=old.purpose,
            group_id=old.group_id,
            task_id=old.task_id,
            member=old.member,
            attempt=old.attempt,
            reward_hash=old.reward_hash,
            started_s=old.started_s,
            finished_s=old.finished_s,
        )
        written = list(episode_records(attempt, again.outcome, again.vertices))
        assert {repr(record) for record in written} == {repr(record) for record in again.records}


@pytest.mark.parametrize(
    ("versions", "needs", "why"),
    [
        ({"planner": 0, "solver": 1, "verifier": 0}, {}, "another version sampled it"),
        ({"planner": 0, "solver": 0, "verifier": 0}, {"solver": {"judge"}}, "its late field never came"),
    ],
)
def test_an_episode_that_does_not_fit_the_open_step_runs_again(
    tmp_path: Path, versions: dict[str, int], needs: dict[str, set[str]], why: str
) -> None:
    session(store_on(tmp_path, MemoryJournal()), steps=1)
    reader = MegReader(str(tmp_path))
    tables = ("episodes", "invocations", "edges", "segments")
    records = [row for table in tables for row in from_table(table, reader.read_table("sim", table, [1]))]
    assert ended_episodes(records, step=1, versions=versions, needs=needs) == {}, why


def test_tokens_of_old_versions_are_dropped_and_the_event_log_says_so_first(tmp_path: Path) -> None:
    store = store_on(tmp_path, MemoryJournal())
    simulated = session(store, steps=8, storage={"keep_tokens_of_versions": 2})
    (dropped,) = [
        event for line in simulated.events if (event := json.loads(line))["kind"] == "tokens_dropped"
    ]
    made = rows(tmp_path, "policy_versions", "policy", "version", "step")
    newest = {
        step for policy in {p for p, *_ in made} for step in [s for p, _, s in made if p == policy][-2:]
    }
    assert dropped["steps"] == list(range(min(newest))) and dropped["size_bytes"] > 0
    reader = MegReader(str(tmp_path))
    with pytest.raises(TokensDropped, match="step 3"):
        reader.read_table("sim", "segments", [3])
    assert reader.read_table("sim", "segments", [7, 8]).num_rows > 0
    assert len(rows(tmp_path, "invocations", "invocation_id")) == (4 + 8 * 6 + 4) * 5
