"""Small random runs for lineage, and what their raw records say of a version: the slow reference."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from megloom.compute.graph.records import EpisodeRecord, InvocationRecord, MicroBatchRecord, SampleRecord

POLICIES = ("planner", "solver")
Key = tuple[str, int]


def random_run(build: Any, seed: int, num_steps: int) -> list[list[Any]]:
    """The records of each step. Policies skip updates, calls span versions, episodes fail and are retried."""
    rng = random.Random(seed)
    newest = dict.fromkeys(POLICIES, 0)
    steps: list[list[Any]] = []
    for step in range(num_steps):
        records: list[Any] = []
        if step == 0:
            records += [build.version(policy, 0, step=0) for policy in POLICIES]
            records += [build.task(f"t{number}") for number in range(4)]
        samples: dict[str, list[SampleRecord]] = {policy: [] for policy in POLICIES}
        for number in range(rng.randint(0, 3)):
            episode = f"g{step:06d}-{number:04d}-m000"
            _add_episode(build, rng, records, samples, newest, step, episode)
        if step == 0 and rng.random() < 0.5:
            samples["solver"].append(_demonstration(build))
        made = [policy for policy in POLICIES if rng.random() < 0.7]
        records += [record for rows in samples.values() for record in rows]
        for policy in made:
            records += _update(build, rng, samples[policy], newest, step, policy)
        for policy in made:
            newest[policy] += 1
        steps.append(records)
    return steps


def _add_episode(
    build: Any,
    rng: random.Random,
    records: list[Any],
    samples: dict[str, list[SampleRecord]],
    newest: dict[str, int],
    step: int,
    episode: str,
) -> None:
    task = f"t{rng.randrange(4)}"
    attempts = rng.randint(1, 2)
    for attempt in range(attempts):
        state = "scored" if attempt == attempts - 1 else "failed"
        at = {"step": step, "attempt": attempt}
        records.append(
            build.episode(episode, task_id=task, state=state, reward_hash=f"h{rng.randrange(2)}", **at)
        )
        for index in range(rng.randint(1, 4)):
            agent = rng.choice((*POLICIES, "judge"))
            high = rng.randint(0, newest.get(agent, 0))
            low = rng.randint(max(0, high - 1), high)
            call = f"{episode}-a{attempt}-i{index:03d}"
            versions = {"version_min": low, "version_max": high}
            records.append(
                build.invocation(call, episode_id=episode, agent=agent, policy=agent, **at, **versions)
            )
            if state == "scored" and agent in POLICIES:
                samples[agent].append(
                    build.sample(
                        f"{call}-s", step=step, episode_id=episode, invocation_id=call, task_id=task,
                        agent=agent, policy=agent, **versions,
                    )
                )  # fmt: skip


def _demonstration(build: Any) -> SampleRecord:
    return build.sample(
        "solver-d000000-000000", step=0, kind="demonstration", invocation_id=None, task_id=None,
        episode_id="", reward=None, version_min=None, version_max=None,
    )  # fmt: skip


def _update(
    build: Any,
    rng: random.Random,
    samples: list[SampleRecord],
    newest: dict[str, int],
    step: int,
    policy: str,
) -> list[Any]:
    """The policy's micro-batches and its new version; some samples are dropped."""
    ids = [sample.sample_id for sample in samples if rng.random() < 0.8]
    cut = rng.randint(0, len(ids))
    at = {"step": step, "policy": policy, "base_version": newest[policy]}
    batches = [
        build.micro_batch(f"{policy}-s{step:06d}-b{n:04d}", position=n, sample_ids=part, **at)
        for n, part in enumerate((ids[:cut], ids[cut:]))
        if part
    ]
    code = f"k{step // 4}"
    return [*batches, build.version(policy, newest[policy] + 1, step=step, kind="train", code_hash=code)]


class Raw:
    """Answers from the records themselves, by loops over all of them."""

    def __init__(self, steps: Iterable[list[Any]]) -> None:
        self.records = [record for records in steps for record in records]
        self.versions = {(r.policy, r.version): r for r in self.records if hasattr(r, "parent_version")}
        self.samples = {r.sample_id: r for r in self._of(SampleRecord)}
        self.calls = {r.invocation_id: r for r in self._of(InvocationRecord)}

    def _of(self, record: type) -> list[Any]:
        return [r for r in self.records if isinstance(r, record)]

    def samples_of(self, key: Key) -> list[SampleRecord]:
        row = self.versions[key]
        return [
            self.samples[name]
            for batch in self._of(MicroBatchRecord)
            if (batch.policy, batch.step, batch.base_version) == (row.policy, row.step, row.parent_version)
            for name in batch.sample_ids
        ]

    def edges_of(self, key: Key) -> dict[tuple[str, Key], int | None]:
        if key not in self.versions:
            return {}
        row = self.versions[key]
        found: dict[tuple[str, Key], int | None] = {}
        if row.parent_version is not None:
            found["parent", (row.policy, row.parent_version)] = None
        attempts = {
            (self.calls[s.invocation_id].episode_id, self.calls[s.invocation_id].attempt)
            for s in self.samples_of(key)
            if s.invocation_id is not None
        }
        sampled: Counter[Key] = Counter()
        for call in self.calls.values():
            if (call.episode_id, call.attempt) in attempts:
                sampled.update((call.policy, v) for v in range(call.version_min, call.version_max + 1))
        return found | {("sampled", source): num for source, num in sampled.items()}

    def closure(self, key: Key) -> set[Key]:
        found, todo = {key}, [key]
        while todo:
            for _, source in self.edges_of(todo.pop()):
                if source not in found:
                    found.add(source)
                    todo.append(source)
        return found

    def influenced(self, task_id: str) -> set[Key]:
        """All versions with a sample of the task anywhere in their closure."""
        return {
            key
            for key in self.versions
            if any(
                sample.task_id == task_id
                for behind in self.closure(key)
                if behind in self.versions
                for sample in self.samples_of(behind)
            )
        }

    def scored_by(self, reward_hash: str) -> set[Key]:
        """The versions with a sample whose scored episode names the reward function."""
        scored = {
            r.episode_id
            for r in self._of(EpisodeRecord)
            if r.state == "scored" and r.reward_hash == reward_hash
        }
        return {key for key in self.versions if any(s.episode_id in scored for s in self.samples_of(key))}
