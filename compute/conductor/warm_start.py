"""The demonstration step: a short supervised warm start, recorded with its own lineage (samples, batches)."""

from __future__ import annotations

import asyncio
import random

from megloom.compute.conductor.gradients import MAX_TRAINER_LOSSES, GradientLane, LaneStep
from megloom.compute.conductor.run import Run
from megloom.compute.conductor.samples import Sample, demonstration_samples
from megloom.compute.graph.records import SegmentRecord
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.rollout.protocol import DemonstrationRow
from megloom.compute.trainers.protocol import Published, TrainerLost


async def imitate(run: Run, *, num_examples: int) -> tuple[dict[str, LaneStep], dict[str, Published]]:
    """Trains every policy that has demonstrations, all at once; returns their work and new versions.

    An optimizer step follows each `warm_batch` examples; the whole pass is one policy version.
    """
    step = run.ledger.next_step
    if not run.plan.has_demonstrations or not num_examples:
        return {}, {}
    worker = await run.desk.any_worker()
    rows = await worker.demonstrations(num_examples, derive_seed(run.config.seed, "demonstrations", step))
    by_policy: dict[str, list[DemonstrationRow]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, []).append(row)
    async with asyncio.TaskGroup() as tasks:
        running = {
            policy: tasks.create_task(_imitate(run, lane, by_policy[policy]), name=f"imitate:{policy}")
            for policy, lane in run.lanes.items()
            if by_policy.get(policy)
        }
    results = {policy: task.result() for policy, task in running.items()}
    work = {policy: lane_step for policy, (lane_step, _) in results.items()}
    return work, {policy: published for policy, (_, published) in results.items()}


async def _imitate(run: Run, lane: GradientLane, rows: list[DemonstrationRow]) -> tuple[LaneStep, Published]:
    step, policy = run.ledger.next_step, rows[0].policy
    # Neighbours come from one dialogue: a batch of them would be worth far less than its size.
    random.Random(derive_seed(run.config.seed, "shuffle", policy, step)).shuffle(rows)
    samples = demonstration_samples(run=run.name, step=step, first=0, rows=rows)
    work, published = await _surviving_pass(run, lane, policy, samples)
    for sample in samples:
        assert sample.row is not None
        run.store.record(
            SegmentRecord(
                segment_id=sample.record.leaf_segment,
                episode_id="",
                run=run.name,
                step=step,
                policy=policy,
                parent=None,
                start=0,
                sampled=False,
                token_ids=sample.row.token_ids.tolist(),
                logprobs=None,
                version_spans=None,
            )
        )
    await run.store.flush()  # tens of thousands of records: they must not wait for the commit in memory
    return work, published


async def _surviving_pass(
    run: Run, lane: GradientLane, policy: str, samples: list[Sample]
) -> tuple[LaneStep, Published]:
    """One pass over the samples. A lost trainer begins it again from the committed weights."""
    step, size = run.ledger.next_step, run.training.warm_batch
    for losses in range(1, MAX_TRAINER_LOSSES + 1):
        work = lane.begin(step, run.ledger.policies[policy].version)
        try:
            for start in range(0, len(samples), size):
                await lane.imitate(samples[start : start + size], warm=step == 0)
            published = await lane.publish(
                version=run.ledger.next_version(policy),
                weights_dir=run.paths.weights(policy),
                state_path=run.paths.state(policy, step),
            )
        except TrainerLost as error:
            if losses == MAX_TRAINER_LOSSES:
                raise
            await lane.revive(error)
        else:
            return work, published
    raise AssertionError("unreachable: the last pass returns or raises")
