"""The training view against brute force: any order of ends, attempts, fields, give-ups and takes.

The view is incremental; the brute force scans everything at every event, with the definitions as the module's
docstring gives them. `make fuzz` runs many more examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.training_view import Candidate, FieldValue, TrainingView, TrainingViewError

NEEDS: Mapping[str, frozenset[str]] = {"planner": frozenset(), "solver": frozenset({"value", "verdict"})}
POLICIES = (*NEEDS, "frozen")  # a policy that is not trained is not kept
FIELDS = ("value", "verdict", "note")
VALUE = FieldValue(value=1.0, source="test", ready_s=0.0)
Pair = tuple[str, str]
Drawn = tuple[str, set[str], int | None]  # a call: policy, its ready fields, the version that sampled it
CALLS = st.lists(
    st.tuples(
        st.sampled_from(POLICIES), st.sets(st.sampled_from(FIELDS)), st.one_of(st.none(), st.integers(0, 2))
    ),
    max_size=3,
)


@dataclass(kw_only=True, slots=True)
class Group:
    num_members: int
    newest: dict[int, int] = field(default_factory=dict)  # member → newest attempt
    ended: set[int] = field(default_factory=set)
    calls: dict[str, tuple[str, int]] = field(default_factory=dict)  # call → policy and member, as they came
    taken: set[str] = field(default_factory=set)


@dataclass(kw_only=True, slots=True)
class Replay:
    """The view's state by the events so far, with scans only."""

    groups: dict[str, Group] = field(default_factory=dict)
    fields: dict[str, set[str]] = field(default_factory=dict)  # call → its ready fields
    trainable: list[Pair] = field(default_factory=list)  # in the order of becoming trainable
    num_late: int = 0

    def play(self, kind: str, *event: Any) -> list[Pair]:
        """Takes note of an event; returns what became trainable by it."""
        getattr(self, f"_{kind}")(*event)
        before, now = self.trainable, [pair for pair in self.pairs() if self.is_trainable(*pair)]
        new = [pair for pair in now if pair not in before]
        self.trainable = [pair for pair in before if pair in now] + new
        return new

    def pairs(self) -> Iterator[Pair]:
        return ((policy, name) for name in self.groups for policy in NEEDS)

    def is_trainable(self, policy: str, name: str) -> bool:
        group = self.groups[name]
        has_ended = len(group.ended) == group.num_members
        return has_ended and policy not in group.taken and not self.missing(policy, name)

    def missing(self, policy: str, name: str) -> set[Pair]:
        return {
            (call, need) for call in self.calls(policy, name) for need in NEEDS[policy] - self.fields[call]
        }

    def calls(self, policy: str, name: str) -> list[str]:
        return [call for call, (owner, _) in self.groups[name].calls.items() if owner == policy]

    def kept(self) -> list[str]:
        return [call for group in self.groups.values() for call in group.calls]

    def _open(self, name: str, num_members: int) -> None:
        self.groups[name] = Group(num_members=num_members)

    def _attempt(self, name: str, member: int, attempt: int) -> None:
        newest = self.groups[name].newest
        newest[member] = max(attempt, newest.get(member, 0))

    def _ended(self, name: str, member: int, attempt: int, calls: Mapping[str, tuple[str, set[str]]]) -> None:
        group = self.groups.get(name)
        if group is None or member in group.ended or attempt < group.newest.get(member, 0):
            self.num_late += 1
            return
        group.ended.add(member)
        for call, (policy, ready) in calls.items():
            if policy in NEEDS:
                group.calls[call] = (policy, member)
                self.fields[call] = set(ready)

    def _field(self, call: str, name: str) -> None:
        if call not in self.kept() or name in self.fields[call]:
            self.num_late += 1
        else:
            self.fields[call].add(name)

    def _give_up(self, policy: str, name: str) -> None:
        for call in {call for call, _ in self.missing(policy, name)}:
            del self.groups[name].calls[call]

    def _take(self, policy: str, name: str) -> None:
        group = self.groups[name]
        group.calls = {call: owner for call, owner in group.calls.items() if owner[0] != policy}
        group.taken.add(policy)
        if group.taken == set(NEEDS):
            del self.groups[name]


class TrainingViewMachine(RuleBasedStateMachine):
    """Groups of several members and attempts; whatever comes twice, late or never."""

    def __init__(self) -> None:
        super().__init__()
        self.view, self.now = TrainingView(NEEDS), Replay()
        self.opened: dict[str, int] = {}  # every group that ever was, with its members
        self.seen: list[str] = []  # every call that ever was
        self.versions: dict[str, int | None] = {}

    @precondition(lambda self: len(self.now.groups) < 3)
    @rule(num_members=st.integers(1, 3))
    def open_a_group(self, num_members: int) -> None:
        name = f"g{len(self.opened)}"
        self.opened[name] = num_members
        self.view.open_group(name, num_members=num_members)
        self.now.play("open", name, num_members)

    @precondition(lambda self: self.now.groups)
    @rule(data=st.data(), attempt=st.integers(0, 2))
    def begin_an_attempt(self, data: st.DataObject, attempt: int) -> None:
        name, member = self.pick_member(data, self.now.groups)
        self.view.begin_attempt(name, member, attempt)
        self.now.play("attempt", name, member, attempt)

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), attempt=st.integers(0, 2), calls=CALLS)
    def end_a_member(self, data: st.DataObject, attempt: int, calls: list[Drawn]) -> None:
        """Any attempt of any member of any group, gone ones too; without calls it has failed."""
        name, member = self.pick_member(data, self.opened)
        self.end(name, member, attempt, calls)

    @precondition(lambda self: self.now.groups)
    @rule(data=st.data(), calls=CALLS)
    def end_the_other_members(self, data: st.DataObject, calls: list[Drawn]) -> None:
        name = data.draw(st.sampled_from(sorted(self.now.groups)))
        for member in set(range(self.opened[name])) - self.now.groups[name].ended:
            self.end(name, member, self.now.groups[name].newest.get(member, 0), calls)

    @precondition(lambda self: self.now.groups)
    @rule(data=st.data(), calls=CALLS)
    def end_a_lost_attempt(self, data: st.DataObject, calls: list[Drawn]) -> None:
        """An older attempt sends its calls after a newer one has begun."""
        name, member = self.pick_member(data, self.now.groups)
        newest = self.now.groups[name].newest.get(member, 0)
        self.view.begin_attempt(name, member, newest + 1)
        self.now.play("attempt", name, member, newest + 1)
        self.end(name, member, newest, calls)

    def end(self, name: str, member: int, attempt: int, drawn: list[Drawn]) -> None:
        calls, told = [], {}
        for policy, ready, version in drawn:
            call = f"{name}-m{member}-a{attempt}-i{len(self.seen):03d}"
            self.seen.append(call)
            self.versions[call] = version
            calls.append(candidate(call, policy, member, ready, version))
            told[call] = (policy, ready)
        became = self.view.member_ended(name, member, attempt, calls)
        assert sorted(became) == sorted(self.now.play("ended", name, member, attempt, told))

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), name=st.sampled_from(FIELDS))
    def give_a_field(self, data: st.DataObject, name: str) -> None:
        """Of any call that ever was: given up, taken and untrained ones are late."""
        call = data.draw(st.sampled_from(self.seen))
        became = self.view.set_field(call, name, VALUE)
        assert became == self.now.play("field", call, name)

    @precondition(lambda self: self.now.groups)
    @rule(data=st.data(), policy=st.sampled_from(sorted(NEEDS)))
    def give_up(self, data: st.DataObject, policy: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.now.groups)))
        missing = self.now.missing(policy, name)
        lost = self.view.give_up(policy, name)
        assert sorted((call.vertex.invocation_id, lacks) for call, lacks in lost) == sorted(missing)
        self.now.play("give_up", policy, name)

    @precondition(lambda self: self.now.groups)
    @rule(data=st.data(), policy=st.sampled_from(sorted(NEEDS)))
    def take(self, data: st.DataObject, policy: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.now.groups)))
        if (policy, name) not in self.now.trainable:
            with pytest.raises(TrainingViewError, match=f"{name} is not trainable for {policy}"):
                self.view.take(policy, name)
            return
        expected = self.now.calls(policy, name)
        assert [call.vertex.invocation_id for call in self.view.take(policy, name)] == expected
        self.now.play("take", policy, name)

    @precondition(lambda self: self.now.groups)
    @rule(data=st.data())
    def refuse_what_does_not_fit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.now.groups)))
        with pytest.raises(TrainingViewError, match="open already"):
            self.view.open_group(name, num_members=1)
        with pytest.raises(TrainingViewError, match="member 7 of"):
            self.view.member_ended(name, 7, 0, [])
        free = set(range(self.opened[name])) - self.now.groups[name].ended
        if free and self.now.kept():
            twice = candidate(self.now.kept()[0], "solver", min(free), set(), None)
            with pytest.raises(TrainingViewError, match="in the training view already"):
                self.view.member_ended(name, min(free), 99, [twice])

    @rule(policy=st.sampled_from(sorted(NEEDS)), version=st.one_of(st.none(), st.integers(0, 2)))
    def read_the_table(self, policy: str, version: int | None) -> None:
        names = [name for owner, name in self.now.trainable if owner == policy]
        rows = [(name, call) for name in names for call in self.now.calls(policy, name)]
        expected = [row for row in rows if version is None or self.versions[row[1]] == version]
        table = self.view.table(policy, version).select(["group_id", "invocation_id"])
        assert [tuple(row.values()) for row in table.to_pylist()] == expected

    def pick_member(self, data: st.DataObject, groups: Iterable[str]) -> tuple[str, int]:
        name = data.draw(st.sampled_from(sorted(groups)))
        return name, data.draw(st.integers(0, self.opened[name] - 1))

    @invariant()
    def trainable_groups_are_those_of_the_log_in_order(self) -> None:
        for policy in NEEDS:
            expected = [name for owner, name in self.now.trainable if owner == policy]
            assert self.view.trainable(policy) == expected

    @invariant()
    def fields_to_come_and_calls_kept_are_those_of_the_log(self) -> None:
        for policy, name in self.now.pairs():
            assert self.view.waiting(policy, name) == sorted(self.now.missing(policy, name))
        kept = self.now.kept()
        assert len(self.view) == len(kept)
        assert [call for call in self.seen if self.view.has_call(call)] == sorted(kept, key=self.seen.index)
        assert self.view.num_late == self.now.num_late


def candidate(name: str, policy: str, member: int, ready: set[str], version: int | None) -> Candidate:
    vertex = Vertex(
        invocation_id=name,
        episode_id=name.rpartition("-i")[0],
        agent=policy,
        policy=policy,
        index=0,
        parents=(),
        registered_s=0.0,
        seed=0,
        temperature=1.0,
        max_tokens=8,
        state=InvocationState.DONE,
        prompt_ids=(1, 2),
        token_ids=(7, 8),
        logprobs=(-0.5, -0.25),
        version_spans=() if version is None else ((version + 1, 0, 1), (version, 1, 2)),
        fields=dict.fromkeys(ready, VALUE),
    )
    return Candidate(vertex=vertex, member=member, reward=1.0)


# A failure is made small before it is shown, which takes up to five minutes.
TestTrainingView = pytest.mark.timeout(400)(TrainingViewMachine.TestCase)
TestTrainingView.settings = settings(deadline=None, stateful_step_count=60)
