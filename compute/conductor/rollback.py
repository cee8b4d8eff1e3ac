"""Back to an older version of a policy: a step of its own, sealed like the others.

It moves the committed pointer and nothing else: newer versions stay on the disk until they are pruned, and
the next version that is trained has a number that nobody had before, with the old version as its parent. The
trainer goes on with the state that belongs to that version if one is kept, else with fresh moments; the
step's report says which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megloom.compute.conductor.keeping import VersionKeeper
from megloom.compute.conductor.ledger import Ledger
from megloom.compute.conductor.loading import load_committed
from megloom.compute.conductor.reports import CheckReport, PolicyReport, StepReport
from megloom.compute.conductor.run import Run
from megloom.compute.conductor.snapshot import Snapshot
from megloom.compute.graph.records import TABLE_OF, record_key
from megloom.compute.store.step_store import StepStore
from megloom.compute.trainers.protocol import Published, TrainerLost

log = logging.getLogger(__name__)
KIND = "rollback"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """What a rollback did. `with_state` is False if the trainer began with fresh moments."""

    run: str
    policy: str
    step: int
    from_version: int
    version: int
    with_state: bool


async def roll_back(run: Run, keeper: VersionKeeper, last: Snapshot, policy: str, version: int) -> RolledBack:
    """Rolls a running session's policy back, between two of its steps: trainer, engines, then the seal.

    `last` is the newest sealed snapshot. A kill before the seal leaves the run where it was. If the session
    has just begun, what it was to go on with in its open step is dropped, as for a stopped run.
    Raises: ValueError, UnknownVersion, PublishAborted; TrainerError.
    """
    to, ledger = await _target(keeper, run.ledger, policy, version)
    if policy not in run.lanes:
        raise ValueError(f"policy {policy} is not trained: it has one version")
    lane = run.lanes[policy]
    try:
        await load_committed(lane.trainer, ledger, policy)
    except TrainerLost as error:
        await lane.revive(error)
        await load_committed(lane.trainer, ledger, policy)
    await run.publisher.publish(policy, to)
    await _drop_restored(run)
    done = _done(run.name, run.ledger, ledger, policy)
    report = rollback_report(last, ledger, done, at_s=run.clock(), wall_time=run.wall_time())
    await run.store.seal(run.name, done.step, replace(last, ledger=ledger, report=report).to_json())
    run.ledger = ledger
    run.events.add("rollback", policy=policy, from_version=done.from_version, version=version)
    run.on_commit(report)
    return done


async def roll_back_stopped(
    store: StepStore,
    keeper: VersionKeeper,
    *,
    run: str,
    policy: str,
    version: int,
    wall_time: Callable[[], str],
) -> RolledBack:
    """The same for a run that has no session: the next start finds the older version committed.

    What the open step had ended was sampled by the version that is left: it is dropped.
    Raises: ValueError, UnknownVersion; FileNotFoundError if the run has no sealed step.
    """
    manifest = await store.recover(run)
    if manifest is None:
        raise FileNotFoundError(f"run {run} has no sealed step")
    last = Snapshot.from_json(manifest.snapshot)
    _, ledger = await _target(keeper, last.ledger, policy, version)
    done = _done(run, last.ledger, ledger, policy)
    report = rollback_report(last, ledger, done, at_s=last.report.finished_s, wall_time=wall_time())
    await store.keep_unsealed([])
    await store.seal(run, done.step, replace(last, ledger=ledger, report=report).to_json())
    return done


def rollback_report(
    before: Snapshot, ledger: Ledger, done: RolledBack, *, at_s: float, wall_time: str
) -> StepReport:
    """The report of a rollback: nothing sampled, nothing trained, a policy on another version."""
    state = "its optimizer state" if done.with_state else "fresh moments: no state of that version is kept"
    detail = f"{done.policy}: version {done.from_version} to {done.version}, with {state}"
    if left := before.ledger.algorithm_states.get(done.policy):
        detail += (
            f"; its algorithm begins anew ({', '.join(sorted(left))} belonged to the line that was left)"
        )
    last = before.report
    return replace(
        last,
        step=done.step,
        kind=KIND,
        started_s=at_s,
        finished_s=at_s,
        reward=(0.0, 0),
        num_tasks=0,
        num_groups=0,
        num_episodes=0,
        num_invocations=0,
        num_prompt_tokens=0,
        num_completion_tokens=0,
        failures={},
        seconds_by_activity={},
        agents={
            name: replace(a, num_calls=0, num_tokens=0, reward=(0.0, 0), rates={})
            for name, a in last.agents.items()
        },
        policies={name: _untrained(report, ledger, name) for name, report in last.policies.items()},
        checks=[CheckReport(name=KIND, passed=True, blocking=False, detail=detail)],
        evaluation=None,
        timeline=[],
        meg_uri=last.meg_uri.rpartition("=")[0] + f"={done.step:06d}",
        wall_time=wall_time,
    )


async def _drop_restored(run: Run) -> None:
    """Else the rollback's seal would hold episodes of a step that it is not, sampled by the version left."""
    episodes = run.desk.take_restored().values()
    doomed = {_key(record) for episode in episodes for record in episode.records}
    if doomed:
        kept = [record for record in await run.store.unsealed() if _key(record) not in doomed]
        num_dropped = await run.store.keep_unsealed(kept)
        run.events.add("restored_dropped", episodes=len(episodes), dropped_records=num_dropped)


def _key(record: Any) -> tuple[str, str]:
    return TABLE_OF[type(record)], record_key(record)


async def _target(
    keeper: VersionKeeper, ledger: Ledger, policy: str, version: int
) -> tuple[Published, Ledger]:
    """Raises: ValueError for an unknown policy or version, UnknownVersion if it is gone or damaged."""
    if policy not in ledger.policies:
        raise ValueError(f"unknown policy {policy!r} (known: {', '.join(sorted(ledger.policies))})")
    to, parent_version = await keeper.find(policy, version)
    return to, ledger.rolled_back(policy, to, parent_version=parent_version)


def _done(run: str, before: Ledger, after: Ledger, policy: str) -> RolledBack:
    return RolledBack(
        run=run,
        policy=policy,
        step=before.next_step,
        from_version=before.policies[policy].version,
        version=after.policies[policy].version,
        with_state=after.policies[policy].state_path is not None,
    )


def _untrained(report: PolicyReport, ledger: Ledger, policy: str) -> PolicyReport:
    entry = ledger.policies[policy]
    zero: dict[str, Any] = dict.fromkeys(("num_samples", "num_trainable", "num_micro_batches"), 0)
    return replace(
        report,
        trained=False,
        version=entry.version,
        parent_version=entry.parent_version,
        uri=entry.uri,
        digest=entry.digest,
        loss=None,
        grad_norm=None,
        max_logprob_gap=None,
        max_off_policy_steps=0,
        micro_batches=[],
        dropped={},
        **zero,
    )
