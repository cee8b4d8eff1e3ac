"""The demonstration step: a short supervised warm start, recorded with its own lineage (samples, batches)."""

from __future__ import annotations

import asyncio
import random

from megloom.compute.conductor.gradients import GradientLane, LaneStep
from megloom.compute.conductor.run import Run
from megloom.compute.conductor.samples import demonstration_samples
from megloom.compute.graph.records import SegmentRecord
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.rollout.protocol import DemonstrationRow
from megloom.compute.trainers.protocol import Published


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
    work = lane.begin(step, run.ledger.policies[policy].version)
    # Neighbours come from one dialogue: a batch of them would be worth far less than its size.
    random.Random(derive_seed(run.config.seed, "shuffle", policy, step)).shuffle(rows)
    samples = demonstration_samples(run=run.name, step=step, first=0, rows=rows)
    for start in range(0, len(samples), run.training.warm_batch):
        await lane.imitate(samples[start : start + run.training.warm_batch], warm=step == 0)
    published = await lane.publish(
        version=run.ledger.next_version(policy),
        weights_dir=run.paths.weights(policy),
        state_path=run.paths.state(policy, step),
    )
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
