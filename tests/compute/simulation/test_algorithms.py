"""Algorithms through the real conductor in virtual time: what is held, what is carried on, what resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.algorithms.base import Kl, PolicyGradient
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.algorithms.rae import Rae
from megloom.compute.algorithms.reinforce_pp import ReinforcePlusPlus
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.simulation.run import Simulated, simulate
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.simulation.team import simulated_team
from megloom.compute.simulation.trainers import ModelledTrainer
from megloom.compute.store.errors import StoreError
from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.store import MegStore
from megloom.compute.workload import Training, Workload

STEPS = 4
MIXED = {"planner": Rae(), "solver": ReinforcePlusPlus(), "verifier": Grpo()}


def team(algorithms: dict[str, PolicyGradient], **overrides: Any) -> Workload:
    workload = simulated_team(Training(tasks_per_step=4, group_size=3, micro_batch_groups=1))
    policies = {
        name: policy.model_copy(update={"algorithm": algorithms.get(name, Grpo())})
        for name, policy in workload.policies.items()
    }
    return replace(workload, policies=policies, **overrides)


def run(workload: Workload, store: Any, mode: str = "frozen", steps: int = STEPS) -> Simulated:
    config = SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": "sim",
            "steps": steps,
            "mode": mode,
            "lease_s": 1e9,
            "training": {"eval_tasks": 1},
        }
    )
    return simulate(workload, config, store=store)


def kept(workload: Workload, mode: str = "frozen") -> MemoryStore:
    store = MemoryStore(keep_steps=STEPS + 1)
    simulated = run(workload, store, mode)
    assert (simulated.state, simulated.failure) == ("finished", None)
    return store


def samples(store: MemoryStore, policy: str) -> dict[str, tuple[float, float, str]]:
    return {
        sample.sample_id: (sample.advantage, sample.reward, sample.state)
        for sealed in store.sealed
        for sample in sealed.records.get("samples", [])
        if sample.policy == policy
    }


def batches(store: MemoryStore, policy: str) -> list[list[str]]:
    return [
        batch.sample_ids
        for sealed in store.sealed
        for batch in sorted(sealed.records.get("micro_batches", []), key=lambda batch: batch.position)
        if batch.policy == policy
    ]


def test_each_policy_has_the_algorithm_of_its_own_and_frozen_and_sync_give_the_same_numbers() -> None:
    frozen, sync = kept(team(MIXED)), kept(team(MIXED), "sync")
    for policy in MIXED:
        assert samples(frozen, policy) == samples(sync, policy) and samples(frozen, policy)
    # A step-wide estimate fixes the micro-batches too, whatever the order in which the groups end.
    assert batches(frozen, "solver") == batches(sync, "solver")
    plain = kept(team({}))
    assert samples(frozen, "verifier") == samples(plain, "verifier")
    assert samples(frozen, "planner") != samples(plain, "planner")


def test_gradients_of_a_step_wide_estimate_begin_when_the_last_group_has_ended() -> None:
    early = 0
    for sealed in kept(team(MIXED)).sealed[1:]:
        spans = sealed.records["cell_intervals"]
        gradients = [span for span in spans if span.activity == "gradient"]
        last_call = max(span.end_s for span in spans if span.role == "roll")
        ended = max(
            episode.finished_s for episode in sealed.records["episodes"] if episode.purpose == "train"
        )
        assert all(span.start_s >= ended for span in gradients if span.policy == "solver")
        early += sum(span.start_s < last_call for span in gradients if span.policy != "solver")
    assert early


def test_the_running_baseline_is_that_of_all_earlier_steps() -> None:
    store = kept(team(MIXED))
    baseline = 0.0
    for sealed in store.sealed[1:]:
        found = [s for s in sealed.records["samples"] if s.policy == "planner"]
        assert all(s.advantage == s.reward - baseline for s in found)
        mean, decay = sum(s.reward for s in found) / len(found), 0.95 ** len(found)
        baseline = decay * baseline + (1 - decay) * mean
        state = sealed.snapshot["ledger"]["algorithm_states"]
        assert set(state) == {"planner"} and state["planner"]["planner"] == pytest.approx(baseline, abs=1e-12)
        baseline = state["planner"]["planner"]


class DyingStore(MegStore):
    """Refuses to seal one step: the session ends there, with the step's episodes in the journal."""

    def __init__(self, *, dies_at: int | None = None, **store: Any) -> None:
        super().__init__(**store)
        self._dies_at = dies_at
        self.states: dict[int, Any] = {}

    async def seal(self, run: str, step: int, snapshot: Any = None) -> Any:
        if step == self._dies_at:
            raise StoreError("the session dies here")
        self.states[step] = json.loads(json.dumps(snapshot))["ledger"]["algorithm_states"]
        return await super().seal(run, step, snapshot)


def test_a_resumed_session_keeps_the_running_baseline_to_the_last_bit(tmp_path: Path) -> None:
    """The solver's three calls of an episode share a reward: they count once, also for a restored episode."""
    own = team({"planner": Rae(), "solver": Rae()})
    workload = replace(own, reward=lambda task, episode: own.reward(task, episode).team)
    straight = DyingStore(root=str(tmp_path / "a"), journal=MemoryJournal(), offload=InlineOffload())
    assert run(workload, straight).state == "finished"
    journal = MemoryJournal()
    broken = {"root": str(tmp_path / "b"), "journal": journal, "offload": InlineOffload()}
    assert run(workload, DyingStore(dies_at=3, **broken)).state == "failed"
    second = DyingStore(**broken)
    assert run(workload, second).state == "finished"
    assert {step: straight.states[step] for step in (3, 4)} == second.states


def test_the_report_counts_dropped_samples_by_cause() -> None:
    always = team({"solver": Grpo(min_group_size=100)}, reward=lambda task, episode: 1.0)
    store = MemoryStore(keep_steps=STEPS + 1)
    for report in run(always, store).reports[1:]:
        # The solver's nine calls of a group share the rewards of three episodes.
        assert report.policies["solver"].dropped == {"small_group": 4 * 3 * 3}
        assert report.policies["planner"].dropped == {"constant_group": 4 * 3}


def test_calls_that_inherit_the_teams_reward_are_one_outcome_of_their_episode() -> None:
    """Each episode has three solver calls: over calls the deviation would be that of nine rewards."""
    workload = team({})
    store = kept(replace(workload, reward=lambda task, episode: workload.reward(task, episode).team))
    trained = 0
    for sealed in store.sealed[1:]:
        calls = sealed.records["invocations"]
        assert {
            call.reward_status for call in calls if call.member >= 0 and call.group_id.startswith("g")
        } == {"inherited"}
        groups: dict[str, dict[str, float]] = {}
        for episode in sealed.records["episodes"]:
            if episode.purpose == "train":
                groups.setdefault(episode.group_id, {})[episode.episode_id] = episode.reward
        for sample in (s for s in sealed.records["samples"] if s.policy == "solver"):
            members = list(groups[sample.group_id])
            found = Grpo().advantages([groups[sample.group_id][name] for name in members])
            assert sample.advantage == found[members.index(sample.episode_id)]
            trained += sample.state == "applied"
    assert trained


def test_a_critics_rows_are_all_trained_and_their_values_are_asked_for() -> None:
    store = kept(team({"solver": Ppo()}))
    found = samples(store, "solver")
    assert len(found) == STEPS * 4 * 3 * 3 and {state for _, _, state in found.values()} == {"applied"}
    activities = {s.activity for sealed in store.sealed for s in sealed.records.get("cell_intervals", [])}
    assert "forward" in activities


def test_a_session_whose_policy_allows_lag_without_a_correction_fails_before_it_samples() -> None:
    workload = team({})
    late = workload.policies["solver"].model_copy(update={"max_off_policy_steps": 2})
    simulated = run(
        replace(workload, policies={**workload.policies, "solver": late}), MemoryStore(keep_steps=1)
    )
    assert simulated.state == "failed" and not simulated.reports
    assert simulated.failure == (
        "ValueError: policy solver: max_off_policy_steps 2 without a correction: "
        "set the algorithm's `correction`"
    )


def test_a_kl_term_refers_to_the_version_that_training_began_with_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    referred: list[tuple[str, str | None]] = []
    load = ModelledTrainer.load

    async def noted(self: ModelledTrainer, **where: Any) -> None:
        referred.append((where["weights_uri"], where.get("reference_uri")))
        await load(self, **where)

    monkeypatch.setattr(ModelledTrainer, "load", noted)
    workload = team({"solver": Grpo(kl=Kl(coefficient=0.1))})
    where: dict[str, Any] = {"root": str(tmp_path), "journal": MemoryJournal(), "offload": InlineOffload()}
    assert run(workload, MegStore(**where), steps=2).state == "finished"
    first, referred[:] = list(referred), []
    assert run(workload, MegStore(**where), steps=STEPS).state == "finished"
    of_solver = [pair for pair in [*first, *referred] if "/solver/" in pair[0]]
    assert {uri for _, uri in of_solver} == {"simulated/store/weights/sim/solver/v000000"}
    assert any(weights != uri for weights, uri in referred if "/solver/" in weights)
    assert not [uri for weights, uri in [*first, *referred] if "/solver/" not in weights and uri]
