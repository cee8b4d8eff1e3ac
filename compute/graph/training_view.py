"""The training view of the graph: ended calls by policy, edges gone, and which groups a loss may take.

    group  open → every member has ended, and every field that the policy's loss needs is ready → trainable
           → taken

A field is a user-defined value of a call, declared by an algorithm or a workload, that may come after the
call's episode: a critic's value, a late judge's score. Members leave before any statistic if a field never
comes (`give_up`). Of a member's attempts the first that ends counts; what an older one sends late changes
nothing. Every operation costs O(calls of one group). Only the conductor's loop writes.
Source: FlexMARL, the experience store's columns with a ready flag each.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.states import GroupState, checked_move

SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("member", pa.int64(), nullable=False),
        pa.field("episode_id", pa.string(), nullable=False),
        pa.field("invocation_id", pa.string(), nullable=False),
        pa.field("agent", pa.string(), nullable=False),
        pa.field("policy", pa.string(), nullable=False),
        pa.field("version_min", pa.int64()),
        pa.field("version_max", pa.int64()),
        pa.field("reward", pa.float64()),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("fields", pa.map_(pa.string(), pa.string()), nullable=False),  # values as JSON
    ]
)


class TrainingViewError(Exception):
    """A group or call that does not fit the view; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldValue:
    """A ready field: a number, or a list with one number for each sampled token."""

    value: float | list[float]
    source: str
    ready_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A finished call that may become a sample; its fields are those of the vertex."""

    vertex: Vertex
    member: int
    reward: float | None
    is_inherited: bool = False  # the reward is that of its whole episode: one outcome, however many calls
    round: int = 0  # its turn among its agent's calls of the episode

    @property
    def version_min(self) -> int | None:
        return min((span[0] for span in self.vertex.version_spans), default=None)


@dataclass(kw_only=True, slots=True)
class _Group:
    num_members: int
    state: GroupState = GroupState.OPEN
    ended: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)  # member → its newest attempt
    calls: dict[str, list[Candidate]] = field(default_factory=dict)  # by policy
    pending: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # policy → (call, field) to come
    taken: set[str] = field(default_factory=set)


class TrainingView:
    """`needs` are the fields that each trained policy's loss reads; calls of other policies are not kept."""

    def __init__(self, needs: Mapping[str, Collection[str]]) -> None:
        self._needs = {policy: frozenset(names) for policy, names in needs.items()}
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, tuple[str, Candidate]] = {}  # a call that is here → its group
        self._trainable: dict[str, OrderedDict[str, None]] = {policy: OrderedDict() for policy in needs}
        self.num_late = 0  # results and fields that came for nothing

    def __len__(self) -> int:
        """How many calls are kept."""
        return len(self._group_of)

    def open_group(self, group_id: str, *, num_members: int) -> None:
        if group_id in self._groups:
            raise TrainingViewError(f"group {group_id} is open already")
        self._groups[group_id] = _Group(num_members=num_members)

    def begin_attempt(self, group_id: str, member: int, attempt: int) -> None:
        """From now on what an older attempt of the member sends is late."""
        attempts = self._group(group_id).attempts
        attempts[member] = max(attempt, attempts.get(member, 0))

    def member_ended(
        self, group_id: str, member: int, attempt: int, calls: Sequence[Candidate]
    ) -> list[tuple[str, str]]:
        """The member's usable calls, none if it failed. Returns what is trainable now: (policy, group).

        Raises: TrainingViewError for an unknown group, member or a call that is here already.
        """
        group = self._groups.get(group_id)
        if group is None or member in group.ended or attempt < group.attempts.get(member, 0):
            self.num_late += 1
            return []
        if not 0 <= member < group.num_members:
            raise TrainingViewError(f"group {group_id}: member {member} of {group.num_members}")
        self._refuse_known(calls)
        for call in calls:
            self._keep(group_id, group, call)
        group.ended.add(member)
        if len(group.ended) < group.num_members:
            return []
        any_calls = any(group.calls.values())
        state = GroupState.COMPLETE if any_calls else GroupState.DISCARDED
        group.state = checked_move(group_id, group.state, state)
        if not self._needs:
            del self._groups[group_id]  # nothing is trained: nobody will take it
        return [ready for policy in self._needs if (ready := self._release(group_id, policy))]

    def has_call(self, invocation_id: str) -> bool:
        return invocation_id in self._group_of

    def set_field(self, invocation_id: str, name: str, value: FieldValue) -> list[tuple[str, str]]:
        """A field of a kept call is ready. Returns what is trainable now; a call that is gone is late.

        The first value counts, so that a retry changes nothing that may have been read.
        """
        group_id, call = self._group_of.get(invocation_id, (None, None))
        if group_id is None or call is None or name in call.vertex.fields:
            self.num_late += 1
            return []
        call.vertex.fields[name] = value
        policy = call.vertex.policy
        self._groups[group_id].pending[policy].discard((invocation_id, name))
        released = self._release(group_id, policy)
        return [released] if released else []

    def waiting(self, policy: str, group_id: str) -> list[tuple[str, str]]:
        """The (call, field) pairs that the policy's loss still needs."""
        return sorted(self._group(group_id).pending.get(policy, ()))

    def give_up(self, policy: str, group_id: str) -> list[tuple[Candidate, str]]:
        """Drops the calls whose fields have not come; returns them with the field that each lacks."""
        group = self._group(group_id)
        kept = {call.vertex.invocation_id: call for call in group.calls.get(policy, [])}
        missing = [(kept[call_id], name) for call_id, name in sorted(group.pending.get(policy, ()))]
        for invocation_id in {call.vertex.invocation_id for call, _ in missing}:
            del kept[invocation_id], self._group_of[invocation_id]
        group.calls[policy] = list(kept.values())
        group.pending[policy] = set()
        self._release(group_id, policy)
        return missing

    def trainable(self, policy: str) -> list[str]:
        """The groups that the policy may be trained on, the first complete one first."""
        return list(self._trainable[policy])

    def take(self, policy: str, group_id: str) -> list[Candidate]:
        """The group's calls of the policy, which leave the view.

        Raises: TrainingViewError if the group is not trainable for the policy, or taken.
        """
        if group_id not in self._trainable[policy]:
            waiting = self.waiting(policy, group_id)
            raise TrainingViewError(f"group {group_id} is not trainable for {policy}: waits for {waiting}")
        del self._trainable[policy][group_id]
        group = self._groups[group_id]
        calls = group.calls.pop(policy, [])
        for call in calls:
            del self._group_of[call.vertex.invocation_id]
        group.taken.add(policy)
        if len(group.taken) == len(self._needs):
            del self._groups[group_id]
        return calls

    def table(self, policy: str, version: int | None = None) -> pa.Table:
        """The trainable calls of a policy as Arrow; with `version` those whose oldest token it sampled."""
        rows = [
            (group_id, call)
            for group_id in self._trainable[policy]
            for call in self._groups[group_id].calls.get(policy, [])
            if version is None or call.version_min == version
        ]
        return pa.Table.from_pylist([_row(group_id, call) for group_id, call in rows], schema=SCHEMA)

    def _group(self, group_id: str) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            raise TrainingViewError(f"group {group_id} is not in the training view")
        return group

    def _refuse_known(self, calls: Sequence[Candidate]) -> None:
        seen: set[str] = set()
        for call in calls:
            name = call.vertex.invocation_id
            if name in seen or name in self._group_of:
                raise TrainingViewError(f"call {name} is in the training view already")
            seen.add(name)

    def _keep(self, group_id: str, group: _Group, call: Candidate) -> None:
        vertex = call.vertex
        needs = self._needs.get(vertex.policy)
        if needs is None:
            return  # a frozen policy: recorded, never trained
        self._group_of[vertex.invocation_id] = (group_id, call)
        group.calls.setdefault(vertex.policy, []).append(call)
        pending = group.pending.setdefault(vertex.policy, set())
        pending.update((vertex.invocation_id, name) for name in needs if name not in vertex.fields)

    def _release(self, group_id: str, policy: str) -> tuple[str, str] | None:
        group = self._groups[group_id]
        if group.state is GroupState.OPEN or group.pending.get(policy) or policy in group.taken:
            return None
        if group_id in self._trainable[policy]:
            return None
        self._trainable[policy][group_id] = None
        return policy, group_id


def _row(group_id: str, call: Candidate) -> dict[str, Any]:
    vertex = call.vertex
    return {
        "group_id": group_id,
        "member": call.member,
        "episode_id": vertex.episode_id,
        "invocation_id": vertex.invocation_id,
        "agent": vertex.agent,
        "policy": vertex.policy,
        "version_min": call.version_min,
        "version_max": max((span[0] for span in vertex.version_spans), default=None),
        "reward": call.reward,
        "prompt_ids": vertex.prompt_ids or (),
        "token_ids": vertex.token_ids,
        "logprobs": vertex.logprobs,
        "fields": [(name, json.dumps(ready.value)) for name, ready in sorted(vertex.fields.items())],
    }
