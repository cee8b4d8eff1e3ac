"""What a session that starts again takes over from the last one: ended episodes, and versions as they were.

The store holds every record of an ended episode, so the conductor's own view of it is rebuilt from there. An
episode counts if its last attempt ended for good, its calls were sampled by the versions that the step is
frozen at, and the fields that losses need are there; everything else of the open step is done anew.
Evaluations are: the weights that they ran on were not committed.

Engines load the committed versions, so a damaged one is mended before the first of them starts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megloom.compute.conductor.events import EventLog
from megloom.compute.conductor.keeping import UnknownVersion, VersionKeeper
from megloom.compute.conductor.ledger import Committed, Ledger
from megloom.compute.conductor.loading import load_committed
from megloom.compute.conductor.recording import LEAF_CLASS
from megloom.compute.graph.ids import is_gateway_call
from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.messages import read_messages
from megloom.compute.graph.paths import path_tokens
from megloom.compute.graph.records import (
    EdgeKind,
    EdgeRecord,
    EpisodeRecord,
    FieldRecord,
    InvocationRecord,
    MessageRecord,
    RewardStatus,
    SegmentRecord,
)
from megloom.compute.graph.seeds import canonical_json
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.training_view import FieldValue
from megloom.compute.rollout.protocol import CallScore, EpisodeOutcome
from megloom.compute.trainers.protocol import MicroBatch, Trainer, TrainerError

RETRIED = frozenset({"worker", "gateway"})  # boundaries whose loss costs an attempt, not the episode
NOTHING = MicroBatch(micro_batch_id="nothing", loss="policy_gradient", rows=())
OF_EPISODES = (EpisodeRecord, InvocationRecord, EdgeRecord, SegmentRecord, MessageRecord)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """An ended episode as the step loop needs it, and the records that it was read from."""

    outcome: EpisodeOutcome
    vertices: list[Vertex]
    records: list[Any]


@dataclass(kw_only=True, slots=True)
class _Found:
    """The records of one episode, all attempts."""

    episodes: list[EpisodeRecord] = field(default_factory=list)
    calls: list[InvocationRecord] = field(default_factory=list)
    edges: list[EdgeRecord] = field(default_factory=list)
    segments: dict[str, SegmentRecord] = field(default_factory=dict)
    messages: dict[str, MessageRecord] = field(default_factory=dict)
    fields: dict[str, dict[str, FieldRecord]] = field(default_factory=dict)  # by call, then name
    records: list[Any] = field(default_factory=list)

    def add(self, record: Any) -> None:
        self.records.append(record)
        match record:
            case EpisodeRecord():
                self.episodes.append(record)
            case InvocationRecord():
                self.calls.append(record)
            case EdgeRecord():
                self.edges.append(record)
            case SegmentRecord():
                self.segments[record.segment_id] = record
            case MessageRecord():
                self.messages[record.message_id] = record
            case FieldRecord():
                self.fields.setdefault(record.invocation_id, {})[record.name] = record


def ended_episodes(
    records: Iterable[Any],
    *,
    step: int,
    versions: Mapping[str, int],
    needs: Mapping[str, Collection[str]],
) -> dict[str, Restored]:
    """The training episodes of `step` that may stand as they are, by id."""
    found = _by_episode(records)
    restored = {}
    for episode_id, parts in found.items():
        if not parts.episodes:
            continue  # it was still running
        last = max(parts.episodes, key=lambda episode: episode.attempt)
        calls = sorted((c for c in parts.calls if c.attempt == last.attempt), key=lambda c: c.index)
        is_over = last.failure_boundary not in RETRIED
        if last.purpose == "train" and last.step == step and is_over and _fits(calls, parts, versions, needs):
            vertices = [_vertex(call, parts) for call in calls]
            restored[episode_id] = Restored(
                outcome=_outcome(last, calls), vertices=vertices, records=parts.records
            )
    return restored


def _by_episode(records: Iterable[Any]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    fields: list[FieldRecord] = []
    for record in records:
        if isinstance(record, FieldRecord):
            fields.append(record)
        elif isinstance(record, OF_EPISODES):
            found.setdefault(record.episode_id, _Found()).add(record)
    episode_of = {call.invocation_id: call.episode_id for parts in found.values() for call in parts.calls}
    for record in fields:
        if (episode_id := episode_of.get(record.invocation_id)) is not None:
            found[episode_id].add(record)
    return found


def _fits(
    calls: Sequence[InvocationRecord],
    parts: _Found,
    versions: Mapping[str, int],
    needs: Mapping[str, Collection[str]],
) -> bool:
    for call in calls:
        if call.version_min is not None and {call.version_min, call.version_max} != {versions[call.policy]}:
            return False
        names = parts.fields.get(call.invocation_id, {})
        if call.state == InvocationState.DONE.value and not set(needs.get(call.policy, ())) <= set(names):
            return False
    return True


def _vertex(call: InvocationRecord, parts: _Found) -> Vertex:
    prompt, answer = call.prompt_segment, call.completion_segment
    sampled = parts.segments[answer] if answer is not None else None
    fields = {
        name: record for name, record in parts.fields.get(call.invocation_id, {}).items() if record.is_ready
    }
    leaf_class = fields.pop(LEAF_CLASS, None)
    is_done = call.state == InvocationState.DONE.value
    return Vertex(
        invocation_id=call.invocation_id,
        episode_id=call.episode_id,
        agent=call.agent,
        policy=call.policy,
        index=call.index,
        parents=tuple(
            (edge.parent, EdgeKind(edge.kind))
            for edge in parts.edges
            if edge.child == call.invocation_id and edge.kind != EdgeKind.EXTENDS.value
        ),
        registered_s=call.registered_s,
        seed=call.seed,
        temperature=call.temperature,
        max_tokens=call.max_tokens,
        state=InvocationState(call.state),
        prompt_ids=tuple(path_tokens(parts.segments, prompt)) if prompt is not None else None,
        token_ids=tuple(sampled.token_ids) if sampled else (),
        logprobs=tuple(sampled.logprobs or ()) if sampled else (),
        version_spans=tuple((v, a, b) for v, a, b in (sampled.version_spans or ())) if sampled else (),
        finish_reason=call.finish_reason,
        failure=None if is_done else call.failure,
        unusable=call.failure if is_done else None,
        leaf_class=json.loads(leaf_class.value or "null") if leaf_class else "main",
        text=call.text,
        cell=call.cell,
        engine=call.engine,
        num_reentries=call.num_reentries,
        ready_s=call.ready_s,
        started_s=call.started_s,
        finished_s=call.finished_s,
        messages=tuple(canonical_json(m) for m in read_messages(parts.messages, call.message))
        if call.message is not None
        else (),
        fields={name: _field_value(record) for name, record in fields.items()},
    )


def _field_value(record: FieldRecord) -> FieldValue:
    value = record.values if record.values is not None else json.loads(record.value or "null")
    assert record.ready_s is not None, record
    return FieldValue(value=value, source=record.source, ready_s=record.ready_s)


def _outcome(episode: EpisodeRecord, calls: Sequence[InvocationRecord]) -> EpisodeOutcome:
    return EpisodeOutcome(
        episode_id=episode.episode_id,
        state=episode.state,
        reward=episode.reward,
        calls=tuple(
            CallScore(
                invocation_id=call.invocation_id,
                text=call.text,
                reward=call.reward,
                is_inherited=call.reward_status == RewardStatus.INHERITED
                or is_gateway_call(call.invocation_id),
            )
            for call in calls
            if call.state == InvocationState.DONE.value
        ),
        metrics={name: (pair[0], pair[1]) for name, pair in json.loads(episode.metrics).items()},
        failure=episode.failure,
        boundary=episode.failure_boundary,
    )


async def mend_versions(
    ledger: Ledger, trainers: Mapping[str, Trainer], *, keeper: VersionKeeper, events: EventLog
) -> None:
    """Checks every committed version. A damaged one is written again by a trainer that loads its own state.

    Afterwards each trainer goes on from the ledger as before. The events say what was damaged and mended.
    Raises: UnknownVersion for one that is not mended, with the file, what is wrong with it, and why it stays
    so; TrainerError.
    """
    for policy, entry in ledger.policies.items():
        try:
            await keeper.find(policy, entry.version)
        except UnknownVersion as damage:
            events.add("version_damaged", policy=policy, version=entry.version, cause=str(damage)[:500])
            await _mend(policy, entry, trainers[policy], damage)
            await keeper.find(policy, entry.version)
            events.add("version_mended", policy=policy, version=entry.version)
            await load_committed(trainers[policy], ledger, policy)


async def _mend(policy: str, entry: Committed, trainer: Trainer, damage: UnknownVersion) -> None:
    if entry.state_path is None:
        raise UnknownVersion(f"{damage}; it is not mended: no trainer state of it is kept") from damage
    try:
        # Without the KL reference, which may be the damaged version itself.
        await trainer.load(weights_uri=entry.uri, state_path=entry.state_path)
        await trainer.forward(NOTHING, ())  # a group loads with the first verb that needs a process
    except TrainerError as error:
        cause = str(error).partition("\n")[0]  # a traceback may follow
        raise UnknownVersion(f"{damage}; it is not mended: {cause}") from error
    finally:
        await trainer.close()
