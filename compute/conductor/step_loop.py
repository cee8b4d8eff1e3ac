"""The main loop. A step: draw tasks → run groups while gradients are taken → update → publish → commit.

Policies are frozen while a step samples (FlexMARL): whatever is sampled in it comes from one version per
policy, gradients are computed as soon as groups are complete, and all policies are updated together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from megloom.compute.conductor.checks import step_checks
from megloom.compute.conductor.commit import commit_step
from megloom.compute.conductor.draws import draw_group
from megloom.compute.conductor.episodes import EndedEpisode, Episode
from megloom.compute.conductor.estimates import StepEstimates
from megloom.compute.conductor.evaluation import evaluate, reward_rate
from megloom.compute.conductor.gradients import LaneStep
from megloom.compute.conductor.loading import load_committed
from megloom.compute.conductor.reports import CheckReport, EvaluationReport
from megloom.compute.conductor.run import Run
from megloom.compute.conductor.samples import candidates
from megloom.compute.conductor.step_report import StepOutcome
from megloom.compute.conductor.warm_start import imitate
from megloom.compute.graph.records import GroupRecord
from megloom.compute.graph.states import GroupState, checked_move
from megloom.compute.scheduling.cursor import take
from megloom.compute.trainers.protocol import Published, TrainerLost

IMITATION_STEPS_PER_WARM_START = 8  # so that the supervised baseline is evaluated as often as training is


class CheckFailed(Exception):
    """A blocking check of a step failed; nothing of the step was committed."""


async def run_steps(run: Run, *, between_steps: Callable[[], Awaitable[None]]) -> None:
    """Steps until the last one, continuing where the ledger stands. Step 0 is the demonstration step."""
    while not is_done(run):
        await between_steps()
        if is_done(run):  # a rollback has taken the last step's number
            return
        if run.ledger.next_step == 0:
            await demonstration_step(run, kind="start", num_examples=run.training.warm_examples)
        elif run.config.imitation_only:
            num_examples = max(1, run.training.warm_examples // IMITATION_STEPS_PER_WARM_START)
            await demonstration_step(run, kind="imitation", num_examples=num_examples)
        else:
            await train_step(run)


def is_done(run: Run) -> bool:
    """True when the last step is committed."""
    return run.ledger.next_step > run.config.steps or run.is_ending


def decide_ending(run: Run) -> bool:
    """Makes the step in work the last one, by count or because the run's time is used up; decided once."""
    out_of_time = run.config.duration_s is not None and run.clock() >= run.config.duration_s
    run.is_ending = run.ledger.next_step >= run.config.steps or out_of_time
    return run.is_ending


async def demonstration_step(run: Run, *, kind: str, num_examples: int) -> None:
    """Supervised steps on fresh demonstrations, one new version each; in step 0 the warm start."""
    started_s = run.clock()
    work, published = await imitate(run, num_examples=num_examples)
    await publish(run, published)
    evaluation = await evaluation_if_due(run, published)
    outcome = StepOutcome(
        kind=kind, started_s=started_s, work=work, published=published, evaluation=evaluation
    )
    await commit_step(run, outcome)
    if kind == "start":  # only now is it known which version a KL term refers to
        for policy in run.ledger.references:
            await refer(run, policy)


async def refer(run: Run, policy: str) -> None:
    """Shows a trainer its reference version; one that is lost over it comes back with it."""
    lane = run.lanes[policy]
    try:
        await load_committed(lane.trainer, run.ledger, policy)
    except TrainerLost as error:
        await lane.revive(error)


async def train_step(run: Run) -> None:
    """One step of reinforcement learning, from the tasks that it draws to its commit."""
    started_s, frozen = run.clock(), run.ledger.versions()
    cursor, drawn = take(
        run.ledger.cursor, run.training.tasks_per_step, task_ids=run.train_ids, seed=run.config.seed
    )
    estimates = {
        policy: StepEstimates(
            algorithm, run.aggregations[policy], run.ledger.algorithm_states.get(policy, {})
        )
        for policy, algorithm in run.algorithms.items()
    }
    ended, work = await rollout_and_gradients(run, drawn, frozen, estimates)
    published = await update(run, work)
    checks = step_checks(ended=ended, versions=frozen, lanes=work, reward=reward_rate(ended))
    stop_on_failure(checks)
    await publish(run, published)
    evaluation = await evaluation_if_due(run, published)
    outcome = StepOutcome(
        kind="train",
        started_s=started_s,
        ended=ended,
        work=work,
        published=published,
        evaluation=evaluation,
        checks=checks,
        cursor=cursor,
        algorithm_states={policy: state for policy, e in estimates.items() if (state := e.next_state())},
    )
    await commit_step(run, outcome)


async def rollout_and_gradients(
    run: Run,
    drawn: Sequence[tuple[int, str]],
    frozen: Mapping[str, int],
    estimates: Mapping[str, StepEstimates],
) -> tuple[list[EndedEpisode], dict[str, LaneStep]]:
    """Runs the groups of all drawn tasks; gradients of complete ones are taken meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        for policy, lane in run.lanes.items():
            lane.open(run.ledger.next_step, frozen[policy], tasks)
        groups = [
            tasks.create_task(run_group(run, number, epoch, task_id, estimates), name=f"group:{number}")
            for number, (epoch, task_id) in enumerate(drawn)
        ]
        ended = [member for group in groups for member in await group]
        for policy, lane in run.lanes.items():
            for samples in estimates[policy].close():
                lane.add_group(samples)
        closing = {
            policy: tasks.create_task(lane.close(), name=f"close:{policy}")
            for policy, lane in run.lanes.items()
        }
    return ended, {policy: task.result() for policy, task in closing.items()}


async def run_group(
    run: Run, number: int, epoch: int, task_id: str, estimates: Mapping[str, StepEstimates]
) -> list[EndedEpisode]:
    """Runs a task's episodes; when all have ended they enter the training view, and from there the lanes."""
    step = run.ledger.next_step
    group_id = f"g{step:06d}-{number:04d}"
    run.view.open_group(group_id, num_members=run.training.group_size)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                run.desk.run(
                    Episode(
                        episode_id=f"{group_id}-m{member:03d}",
                        group_id=group_id,
                        task_id=task_id,
                        split="train",
                        purpose="train",
                        step=step,
                        epoch=epoch,
                        member=member,
                    )
                ),
                name=f"episode:{group_id}-m{member:03d}",
            )
            for member in range(run.training.group_size)
        ]
    members = [task.result() for task in running]
    for ended in members:
        run.view.member_ended(group_id, ended.episode.member, 0, candidates(ended))
    async with asyncio.TaskGroup() as tasks:
        for policy in run.lanes:
            tasks.create_task(
                train_group(run, policy, group_id, task_id, estimates[policy]),
                name=f"train:{group_id}:{policy}",
            )
    num_scored = sum(member.is_scored for member in members)
    state = checked_move(
        group_id, GroupState.OPEN, GroupState.COMPLETE if num_scored else GroupState.DISCARDED
    )
    run.store.record(
        GroupRecord(
            group_id=group_id,
            run=run.name,
            step=step,
            task_id=task_id,
            epoch=epoch,
            num_members=len(members),
            num_scored=num_scored,
            state=state.value,
        )
    )
    run.events.add("group_complete", group=group_id, scored=num_scored)
    return members


async def train_group(run: Run, policy: str, group_id: str, task_id: str, estimates: StepEstimates) -> None:
    """Takes a complete group once its fields are there; what is final goes to the lane."""
    drawn = draw_group(
        run=run.name,
        step=run.ledger.next_step,
        policy=policy,
        group_id=group_id,
        task_id=task_id,
        calls=await run.fields.take(policy, group_id),
        seed=run.config.seed,
        max_paths=run.training.paths_per_episode,
        reward_field=run.algorithms[policy].reward_field,
    )
    for samples in estimates.add(drawn):
        run.lanes[policy].add_group(samples)


async def update(run: Run, work: Mapping[str, LaneStep]) -> dict[str, Published]:
    """One optimizer step for every policy that has samples, all at once; the others keep their version."""
    step = run.ledger.next_step
    async with asyncio.TaskGroup() as tasks:
        updates = {
            policy: tasks.create_task(
                lane.finish(
                    denominator=run.aggregations[policy].denominator(work[policy].samples()),
                    version=run.ledger.next_version(policy),
                    weights_dir=run.paths.weights(policy),
                    state_path=run.paths.state(policy, step),
                ),
                name=f"update:{policy}",
            )
            for policy, lane in run.lanes.items()
            if work[policy].taken
        }
    return {policy: task.result() for policy, task in updates.items()}


async def publish(run: Run, published: Mapping[str, Published]) -> None:
    """Brings the new versions to all engines, all policies at once."""
    async with asyncio.TaskGroup() as tasks:
        for policy, version in published.items():
            tasks.create_task(run.publisher.publish(policy, version), name=f"publish:{policy}")


async def evaluation_if_due(run: Run, published: Mapping[str, Published]) -> EvaluationReport | None:
    """A full evaluation at step 0 and at the last step, a small one every `eval_every` steps."""
    step = run.ledger.next_step
    full = decide_ending(run) or step == 0
    every = run.training.eval_every
    if not run.eval_ids or not (full or (every and step % every == 0)):
        return None
    num_full = run.config.training.eval_tasks or len(run.eval_ids)
    versions = {**run.ledger.versions(), **{name: version.version for name, version in published.items()}}
    return await evaluate(
        run.desk,
        step=step,
        task_ids=run.eval_ids[: num_full if full else run.training.eval_small],
        num_draws=run.training.eval_draws if full else 1,
        full=full,
        versions=versions,
        clock=run.clock,
    )


def stop_on_failure(checks: Sequence[CheckReport]) -> None:
    """Raises: CheckFailed naming each blocking check that failed."""
    failed = [f"{check.name}: {check.detail}" for check in checks if check.blocking and not check.passed]
    if failed:
        raise CheckFailed("; ".join(failed))
