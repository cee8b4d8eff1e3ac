"""An attempt's deadline holds before its first call too: while it waits for a worker or for its gateway.

A cell dies at a time and comes back at another. What waited for it ends at its deadline as a failure of the
infrastructure, is never trained, and the session goes on when the cell is back.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.conductor.backend import CellExit
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.rollout.protocol import EpisodeEvents, EpisodeOrder, EpisodeOutcome, WorkerLost
from megloom.compute.simulation import backend as cells
from megloom.compute.simulation import run as runner
from megloom.compute.simulation.gateway import ModelledGateway, Switchboard
from megloom.compute.simulation.run import Simulated, simulate
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.simulation.team import simulated_team
from megloom.compute.workload import Score, Training

TIMEOUT_S, NUM_EPISODES, STEPS = 20.0, 4, 9
GONE_S, BACK_S = 3.0, 40.0  # in one step and two timeouts later: an attempt in between waits all its time

WORKER_EXITS_S = {"worker": GONE_S, "worker that loses episodes": BACK_S}  # when its exit is noticed


def is_gone() -> bool:
    return GONE_S <= asyncio.get_running_loop().time() < BACK_S


class FlawedBackend(cells.ModelledBackend):
    """Its only worker, or its only gateway, is gone for a while: `flaw` names which, and how."""

    flaw = ""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.flaw in WORKER_EXITS_S:
            lost = CellExit(name="worker/0", incarnation=0, cause="killed by the test")
            at_s = WORKER_EXITS_S[self.flaw]
            self._timers.append(asyncio.get_running_loop().call_at(at_s, self.exits.put_nowait, lost))

    async def start_worker(self, name: str, events: EpisodeEvents) -> cells.ModelledWorker:
        if self.flaw == "worker" and is_gone():
            await asyncio.sleep(BACK_S - GONE_S)
        return await super().start_worker(name, events)

    async def start_gateway(self, name: str, desk: Any) -> ModelledGateway:
        if self.flaw == "gateway" and is_gone():
            await asyncio.sleep(BACK_S - GONE_S)
        return await super().start_gateway(name, desk)


class LosesWhatItGets(cells.ModelledWorker):
    """For a while it loses an episode some seconds after it got it."""

    lost_after_s = 7.0

    async def run_episode(self, order: EpisodeOrder) -> EpisodeOutcome:
        if is_gone():
            await asyncio.sleep(self.lost_after_s)
            raise WorkerLost("connection closed")
        return await super().run_episode(order)


def digits(task: Any, episode: Any) -> Score:
    return Score(team=float(sum(map(int, "".join(episode.result))) % 2))


def run(store: MemoryStore) -> Simulated:
    board = Switchboard()

    async def talk(task: Any, team: Any) -> list[str]:
        place = team.endpoint("solver")
        return [await board.call(place.openai_url, place.token, "solver", "a turn") for _ in range(2)]

    training = Training(tasks_per_step=2, group_size=2, micro_batch_groups=1, episode_timeout_s=TIMEOUT_S)
    workload = replace(simulated_team(training), workflow=talk, reward=digits, uses_gateway=True)
    config = SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": "admission",
            "steps": STEPS,
            "lease_s": 1e9,
            "training": {"eval_tasks": 1},
        }
    )
    faults = cells.Faults(gateway_deaths={"gateway/0": (GONE_S,)} if FlawedBackend.flaw == "gateway" else {})
    return simulate(workload, config, store=store, faults=faults, switchboard=board)


def lines(simulated: Simulated, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, simulated.events) if line["kind"] == kind]


def records(store: MemoryStore, table: str) -> list[Any]:
    return [record for step in store.sealed for record in step.records.get(table, [])]


def unstarted(store: MemoryStore) -> list[Any]:
    return [e for e in records(store, "episodes") if (e.failure or "").startswith("not started within")]


@pytest.mark.parametrize(
    ("flaw", "waited_for"),
    [
        ("worker", "a worker to be up"),
        ("gateway", "a gateway to admit it"),
    ],
)
def test_an_episode_that_is_never_admitted_ends_at_its_deadline_and_the_session_goes_on(
    monkeypatch: pytest.MonkeyPatch, flaw: str, waited_for: str
) -> None:
    monkeypatch.setattr(runner, "ModelledBackend", FlawedBackend)
    monkeypatch.setattr(FlawedBackend, "flaw", flaw)
    store = MemoryStore(keep_steps=STEPS + 1)
    simulated = run(store)
    assert (simulated.state, simulated.failure, len(simulated.reports)) == ("finished", None, STEPS + 1)

    ended = unstarted(store)
    assert {(e.state, e.reward_status, e.reward, e.failure_boundary) for e in ended} == {
        ("failed", "infrastructure", None, "deadline")
    }
    text = f"not started within {TIMEOUT_S:g} s, waiting for: {waited_for}"
    assert len(ended) >= NUM_EPISODES and {e.failure for e in ended} == {text}
    assert [e.finished_s - e.started_s for e in ended] == pytest.approx([TIMEOUT_S] * len(ended))

    names = {e.episode_id for e in ended}
    assert not [call for call in records(store, "invocations") if call.episode_id in names]
    assert not [sample for sample in records(store, "samples") if sample.episode_id in names]
    failed = {report.step: dict(report.failures) for report in simulated.reports if report.failures}
    lost_steps = {e.step for e in ended if e.purpose == "train"}
    assert failed == {step: {"deadline": NUM_EPISODES} for step in lost_steps}
    assert not any(p.trained for r in simulated.reports if r.step in lost_steps for p in r.policies.values())

    last = max(lost_steps)
    assert last < STEPS, "the cell was back in time for another step"
    applied = {sample.step for sample in records(store, "samples") if sample.state == "applied"}
    assert any(step > last for step in applied), "and what came after was trained"


def test_each_attempt_has_a_deadline_of_its_own_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt costs 7 s; the second waits all of its own 20 s, and no third one follows that."""
    monkeypatch.setattr(cells, "ModelledWorker", LosesWhatItGets)
    monkeypatch.setattr(runner, "ModelledBackend", FlawedBackend)
    monkeypatch.setattr(FlawedBackend, "flaw", "worker that loses episodes")
    store = MemoryStore(keep_steps=STEPS + 1)
    simulated = run(store)
    assert (simulated.state, simulated.failure, len(simulated.reports)) == ("finished", None, STEPS + 1)
    ended = unstarted(store)
    assert len(ended) == NUM_EPISODES and {e.attempt for e in ended} == {1}
    by_attempt = {(e.episode_id, e.attempt): e for e in records(store, "episodes")}
    for second in ended:
        first = by_attempt[second.episode_id, 0]
        assert (first.state, first.failure_boundary) == ("failed", "worker")
        assert first.finished_s - first.started_s == pytest.approx(LosesWhatItGets.lost_after_s, abs=0.1)
        assert second.started_s == first.finished_s
        assert second.finished_s - second.started_s == pytest.approx(TIMEOUT_S)
        assert (second.episode_id, 2) not in by_attempt
