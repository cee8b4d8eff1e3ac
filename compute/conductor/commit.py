"""The commit of a step: its records, its report and the next ledger go into one sealed manifest.

What is not in a manifest did not happen: a session that starts again continues from the newest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megloom.compute.conductor.episodes import EndedEpisode
from megloom.compute.conductor.gradients import LaneStep
from megloom.compute.conductor.reports import CheckReport, EvaluationReport
from megloom.compute.conductor.run import Run
from megloom.compute.conductor.step_report import engine_intervals, mean_loss, step_report
from megloom.compute.graph.records import PolicyVersionRecord
from megloom.compute.scheduling.cursor import Cursor
from megloom.compute.trainers.protocol import Published


async def commit_step(
    run: Run,
    *,
    kind: str,
    started_s: float,
    ended: Sequence[EndedEpisode],
    work: Mapping[str, LaneStep],
    published: Mapping[str, Published],
    evaluation: EvaluationReport | None,
    checks: Sequence[CheckReport] = (),
    cursor: Cursor | None = None,
) -> None:
    """Seals the step and moves the ledger. All or nothing: a crash before the manifest undoes the step."""
    step = run.ledger.next_step
    for policy in work:
        run.lanes[policy].record_step()
        await run.store.flush()
    timeline = [*engine_intervals(run, ended), *(i for name in work for i in run.lanes[name].intervals)]
    for interval in timeline:
        run.store.record(interval)
    for policy, version in published.items():
        run.store.record(_version_record(run, kind, policy, version, work[policy]))
    states = {policy: run.paths.state(policy, step) for policy in published}
    ledger = run.ledger.committed(cursor=cursor or run.ledger.cursor, published=published, states=states)
    report = step_report(
        run,
        kind=kind,
        started_s=started_s,
        ended=ended,
        work=work,
        published=published,
        evaluation=evaluation,
        checks=checks,
        timeline=timeline,
    )
    run.events.add("commit", step=step, versions=ledger.versions(), reward=report.reward)
    await run.store.seal(run.name, step, {"ledger": ledger.to_json(), "report": report.to_json()})
    run.ledger = ledger
    run.on_commit(report)


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
        created_at=run.wall_time(),
    )
