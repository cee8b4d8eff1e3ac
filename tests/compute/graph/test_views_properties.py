"""The rollout view against brute force: whatever happens in whatever order, it says what a plain log says.

The graph is incremental; the brute force scans everything at every event. The training view has the same in
`test_training_view_properties.py`. `make fuzz` runs many more examples of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megloom.compute.graph.meg import FINAL, ExecutionGraph, GraphError, Vertex
from megloom.compute.graph.records import EdgeKind
from megloom.compute.graph.states import IllegalMove, InvocationState

POLICIES = ("planner", "solver")
EPISODES = ("e0", "e1", "e2")
S = InvocationState
PICK = st.integers(0, 399)


@dataclass(kw_only=True, slots=True)
class Call:
    """What the replay knows of a call."""

    episode: str
    policy: str
    parents: tuple[str, ...]
    has_prompt: bool
    state: InvocationState = S.BLOCKED


@dataclass(kw_only=True, slots=True)
class Replay:
    """The graph's state by the events so far, with scans only."""

    calls: dict[str, Call] = field(default_factory=dict)
    ready: list[str] = field(default_factory=list)

    def play(self, kind: str, *event: Any) -> None:
        getattr(self, f"_{kind}")(*event)
        for name, call in self.calls.items():
            if call.state is S.BLOCKED and call.has_prompt and self.has_answers(name):
                call.state = S.READY
        self.ready = [name for name in self.ready if self.is_ready(name)]
        self.ready += [name for name in self.calls if self.is_ready(name) and name not in self.ready]

    def is_ready(self, name: str) -> bool:
        return name in self.calls and self.calls[name].state is S.READY

    def has_answers(self, name: str) -> bool:
        """Whether all parents of the call have ended."""
        return all(self.calls[parent].state in FINAL for parent in self.calls[name].parents)

    def waiting_for_prompt(self) -> set[str]:
        return {n for n, call in self.calls.items() if call.state is S.BLOCKED and self.has_answers(n)}

    def _add(self, name: str, episode: str, policy: str, parents: tuple[str, ...], has_prompt: bool) -> None:
        self.calls[name] = Call(episode=episode, policy=policy, parents=parents, has_prompt=has_prompt)

    def _prompt(self, name: str) -> None:
        self.calls[name].has_prompt = True

    def _move(self, name: str, state: InvocationState) -> None:
        self.calls[name].state = state

    def _reenter(self, name: str) -> None:
        self.calls[name].state = S.READY

    def _fail(self, name: str) -> None:
        self.calls[name].state, lost = S.FAILED, {name}
        while True:
            more = [c for c in self.calls.values() if c.state is S.BLOCKED and lost & set(c.parents)]
            if not more:
                return
            for call in more:
                call.state = S.CANCELLED
            lost = {n for n, call in self.calls.items() if any(call is other for other in more)}

    def _cancel(self, episode: str) -> None:
        for call in self.calls.values():
            if call.episode == episode and call.state not in FINAL:
                call.state = S.CANCELLED

    def _take(self, episode: str) -> None:
        self.calls = {name: call for name, call in self.calls.items() if call.episode != episode}


class RolloutViewMachine(RuleBasedStateMachine):
    """Random DAGs of several episodes, policies and attempts, with all that can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.now = ExecutionGraph(), Replay()
        self.names: list[str] = []  # of every call that ever was

    @rule(
        episode=st.sampled_from(EPISODES),
        policy=st.sampled_from(POLICIES),
        picks=st.lists(st.integers(0, 99), max_size=4),
        has_prompt=st.booleans(),
    )
    def add(self, episode: str, policy: str, picks: list[int], has_prompt: bool) -> None:
        """A call after any earlier calls of its episode, ended ones too; a parent may be named twice."""
        there = [name for name, call in self.now.calls.items() if call.episode == episode]
        parents = tuple(there[pick % len(there)] for pick in picks) if there else ()
        has_prompt = has_prompt and all(self.now.calls[parent].state in FINAL for parent in parents)
        name = f"{episode}-i{len(self.names):03d}"
        self.names.append(name)
        is_ready = self.graph.add(vertex(name, episode, policy, parents, has_prompt), now=0.0)
        self.now.play("add", name, episode, policy, parents, has_prompt)
        assert is_ready == self.now.is_ready(name)

    @precondition(lambda self: self.names)
    @rule(pick=PICK, other=PICK)
    def refuse_a_call_that_does_not_fit(self, pick: int, other: int) -> None:
        name, stranger = self.picked(pick, set(S)), self.picked(other, set(S))
        episode = name.partition("-")[0]
        if name in self.now.calls:
            refused(GraphError, self.graph.add, vertex(name, episode, "solver", (), True), now=0.0)
        if stranger not in self.now.calls or self.now.calls[stranger].episode != episode:
            new = vertex(f"{episode}-new", episode, "solver", (stranger,), False)
            refused(GraphError, self.graph.add, new, now=0.0)

    @precondition(lambda self: self.names)
    @rule(pick=PICK)
    def prompt(self, pick: int) -> None:
        name = self.picked(pick, {S.BLOCKED})
        if name not in self.now.calls:
            refused(KeyError, self.graph.set_prompt, name, (1,), now=1.0)
        elif not self.now.has_answers(name) and self.now.calls[name].state is S.BLOCKED:
            refused(GraphError, self.graph.set_prompt, name, (1,), now=1.0)
        elif self.now.calls[name].state is S.BLOCKED:
            assert self.graph.set_prompt(name, (1,), now=1.0)
            self.now.play("prompt", name)

    @rule(policy=st.sampled_from(POLICIES))
    def start_the_oldest(self, policy: str) -> None:
        oldest = self.graph.first_ready(policy)
        if oldest is not None:
            self.graph.start(oldest.invocation_id, cell="c", now=1.0)
            self.now.play("move", oldest.invocation_id, S.RUNNING)

    @precondition(lambda self: self.names)
    @rule(pick=PICK)
    def start(self, pick: int) -> None:
        """Any ready call, not only the oldest."""
        name = self.picked(pick, {S.READY})
        if self.allowed(name, {S.READY}, self.graph.start, cell="c", now=1.0):
            self.now.play("move", name, S.RUNNING)

    @precondition(lambda self: self.names)
    @rule(pick=PICK)
    def reenter(self, pick: int) -> None:
        name = self.picked(pick, {S.RUNNING})
        if self.allowed(name, {S.RUNNING}, self.graph.reenter, now=2.0):
            self.now.play("reenter", name)

    @precondition(lambda self: self.names)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        """Also twice, also after its episode was cancelled or taken: then it is refused and nothing moves."""
        name, before = self.picked(pick, {S.RUNNING}), self.now.waiting_for_prompt()
        unblocked = self.allowed(name, {S.RUNNING}, self.graph.finish, now=3.0)
        if unblocked is not None:
            self.now.play("move", name, S.DONE)
            assert set(unblocked) == self.now.waiting_for_prompt() - before
            assert len(unblocked) == len(set(unblocked))

    @precondition(lambda self: self.names)
    @rule(pick=PICK)
    def fail(self, pick: int) -> None:
        name = self.picked(pick, set(S) - FINAL)
        before = {n for n, call in self.now.calls.items() if call.state is S.CANCELLED}
        cancelled = self.allowed(name, set(S) - FINAL, self.graph.fail, "engine gone", now=3.0)
        if cancelled is not None:
            self.now.play("fail", name)
            after = {n for n, call in self.now.calls.items() if call.state is S.CANCELLED}
            assert Counter(cancelled) == Counter(after - before)

    @rule(episode=st.sampled_from(EPISODES), gone=st.booleans())
    def end_an_attempt(self, episode: str, gone: bool) -> None:
        """The branch is cancelled; `gone`: its calls leave, and what comes of them later is late."""
        running = {
            name
            for name, call in self.now.calls.items()
            if call.episode == episode and call.state is S.RUNNING
        }
        stopped = self.graph.cancel_open(episode, "its episode ended", now=4.0)
        assert {stopped_one.invocation_id for stopped_one in stopped} == running
        self.now.play("cancel", episode)
        if gone:
            there = [name for name, call in self.now.calls.items() if call.episode == episode]
            assert [taken.invocation_id for taken in self.graph.take(episode)] == there
            self.now.play("take", episode)

    def picked(self, pick: int, fitting: set[InvocationState]) -> str:
        """Mostly a call for which the move is legal; else any call that ever was."""
        there = [name for name, call in self.now.calls.items() if call.state in fitting]
        pool = there if there and pick % 4 else self.names
        return pool[pick // 4 % len(pool)]

    def allowed(
        self, name: str, states: set[InvocationState], move: Callable[..., Any], *args: Any, **keywords: Any
    ) -> Any:
        """The move's result (True for none), or None after seeing that it is refused."""
        if name not in self.now.calls:
            refused(KeyError, move, name, *args, **keywords)
        elif self.now.calls[name].state not in states:
            refused(IllegalMove, move, name, *args, **keywords)
        else:
            result = move(name, *args, **keywords)
            return True if result is None else result
        return None

    @invariant()
    def counts_are_those_of_the_log(self) -> None:
        counted = Counter((call.policy, call.state) for call in self.now.calls.values())
        for policy in POLICIES:
            for state in S:
                assert self.graph.count(policy, state) == counted[policy, state], (policy, state)

    @invariant()
    def ready_calls_are_those_of_the_log_in_the_order_of_becoming_ready(self) -> None:
        for policy in POLICIES:
            expected = [name for name in self.now.ready if self.now.calls[name].policy == policy]
            assert self.graph.ready(policy) == expected
            first = self.graph.first_ready(policy)
            assert (first.invocation_id if first else None) == (expected[0] if expected else None)

    @invariant()
    def blocked_calls_wait_for_exactly_the_parents_that_have_not_ended(self) -> None:
        found = {v.invocation_id for v in self.vertices() if v.state is S.BLOCKED and not v.num_pending}
        assert found == self.now.waiting_for_prompt()

    @invariant()
    def every_call_is_there_once_in_the_order_of_its_registration(self) -> None:
        assert len(self.graph) == len(self.now.calls)
        for episode in EPISODES:
            expected = [(n, c.state) for n, c in self.now.calls.items() if c.episode == episode]
            assert [(v.invocation_id, v.state) for v in self.graph.of_episode(episode)] == expected

    def vertices(self) -> Iterator[Vertex]:
        return (v for episode in EPISODES for v in self.graph.of_episode(episode))


def vertex(name: str, episode: str, policy: str, parents: tuple[str, ...], has_prompt: bool) -> Vertex:
    return Vertex(
        invocation_id=name,
        episode_id=episode,
        agent=policy,
        policy=policy,
        index=0,
        parents=tuple((parent, EdgeKind.DATA) for parent in parents),
        registered_s=0.0,
        seed=1,
        temperature=1.0,
        max_tokens=4,
        prompt_ids=(1,) if has_prompt else None,
    )


def refused(error: type[Exception], act: Callable[..., Any], *args: Any, **keywords: Any) -> None:
    with pytest.raises(error):
        act(*args, **keywords)


# A failure is made small before it is shown, which takes up to five minutes.
TestRolloutView = pytest.mark.timeout(400)(RolloutViewMachine.TestCase)
TestRolloutView.settings = settings(deadline=None, stateful_step_count=60)
