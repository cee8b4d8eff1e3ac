"""The commit of a step: its records, its report and the next ledger go into one sealed manifest.

What is not in a manifest did not happen: a session that starts again continues from the newest one.
"""

from __future__ import annotations

from megloom.compute.conductor.gradients import LaneStep
from megloom.compute.conductor.run import Run
from megloom.compute.conductor.snapshot import Snapshot, tasks_hash
from megloom.compute.conductor.step_report import StepOutcome, engine_intervals, mean_loss, step_report
from megloom.compute.graph.records import PolicyVersionRecord
from megloom.compute.store.retention import Plan
from megloom.compute.trainers.protocol import Published

RETENTION_EVERY_STEPS = 8  # a plan lists the run's steps: cheap, but not worth it at every commit


async def commit_step(run: Run, outcome: StepOutcome) -> None:
    """Seals the step and moves the ledger. All or nothing: a crash before the manifest undoes the step."""
    step, work = run.ledger.next_step, outcome.work
    for policy in work:
        run.lanes[policy].record_step()
        await run.store.flush()
    intervals = [interval for policy in work for interval in run.lanes[policy].intervals]
    timeline = [*engine_intervals(run, outcome.ended), *intervals]
    for interval in timeline:
        run.store.record(interval)
    for policy, version in outcome.published.items():
        run.store.record(_version_record(run, outcome.kind, policy, version, work[policy]))
    ledger = run.ledger.committed(
        cursor=outcome.cursor or run.ledger.cursor,
        published=outcome.published,
        states={policy: run.paths.state(policy, step) for policy in outcome.published},
        algorithm_states=outcome.algorithm_states,
    )
    if step == 0:  # what the initial weights or the warm start left is where training begins
        ledger = ledger.referring([name for name, a in run.algorithms.items() if a.kl is not None])
    pinned = await run.keeper.pinned(ledger.policies) if run.keeper else {}
    ledger, left_states = ledger.keeping(run.config.storage.keep_states, pinned)
    report = step_report(run, outcome, timeline)
    run.events.add("commit", step=step, versions=ledger.versions(), reward=report.reward)
    snapshot = Snapshot(
        ledger=ledger, report=report, seed=run.config.seed, tasks_hash=tasks_hash(run.train_ids)
    )
    await run.store.seal(run.name, step, snapshot.to_json())
    run.ledger = ledger
    for path in left_states:
        run.discard_state(path)
    run.on_commit(report)
    for policy in outcome.published:
        await _prune_versions(run, policy)
    if step % RETENTION_EVERY_STEPS == 0:
        await drop_old_tokens(run)


async def _prune_versions(run: Run, policy: str) -> None:
    """Deletes the versions that the policy's `publishing` no longer keeps."""
    keep = run.plan.policies[policy]["publishing"].get("keep_versions")
    if keep is None or run.keeper is None:
        return
    needed = {run.ledger.policies[policy].version}
    if (reference := run.ledger.references.get(policy)) is not None:
        needed.add(reference.version)
    gone = await run.keeper.prune(policy, keep=keep, needed=sorted(needed))
    if gone:
        run.events.add("versions_pruned", policy=policy, versions=gone)


async def drop_old_tokens(run: Run) -> None:
    """What the run's storage settings let go; the event log says what it is before it goes."""
    keep = run.config.storage.keep_tokens_of_versions
    if keep is None:
        return

    def tell(plan: Plan) -> None:
        run.events.add(
            "tokens_dropped",
            steps=[step.step for step in plan.steps],
            files=plan.num_files,
            size_bytes=plan.size_bytes,
        )

    await run.store.drop_tokens(run.name, keep, at=run.wall_time(), tell=tell)


def initial_versions(run: Run) -> list[PolicyVersionRecord]:
    """Version 0 of every policy: its initial weights, made by no sample."""
    return [
        PolicyVersionRecord(
            run=run.name,
            policy=policy,
            version=committed.version,
            parent_version=None,
            step=0,
            kind="initial",
            uri=committed.uri,
            digest=committed.digest,
            num_samples=0,
            num_trainable=0,
            num_optimizer_steps=0,
            loss=None,
            grad_norm=None,
            config_hash=run.config.config_hash(),
            code_hash=run.code_hash,
            reward_hash=run.plan.reward_hash,
            created_at=run.wall_time(),
        )
        for policy, committed in run.ledger.policies.items()
    ]


def _version_record(
    run: Run, kind: str, policy: str, published: Published, work: LaneStep
) -> PolicyVersionRecord:
    return PolicyVersionRecord(
        run=run.name,
        policy=policy,
        version=published.version,
        parent_version=run.ledger.policies[policy].version,
        step=run.ledger.next_step,
        kind=kind,
        uri=published.uri,
        digest=published.digest,
        num_samples=sum(len(taken.samples) for taken in work.taken),
        num_trainable=sum(taken.report.num_trainable for taken in work.taken if taken.report),
        num_optimizer_steps=len(work.taken) if kind != "train" else 1,
        loss=mean_loss(work),
        grad_norm=work.update.grad_norm if work.update else None,
        config_hash=run.config.config_hash(),
        code_hash=run.code_hash,
        reward_hash=run.plan.reward_hash,
        created_at=run.wall_time(),
    )
