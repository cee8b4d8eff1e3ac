"""The conductor's desk for gateways: vertices, places and leases, with hand-fed engines in virtual time."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from megloom.compute.conductor.dispatch import Dispatcher
from megloom.compute.conductor.events import EventLog
from megloom.compute.conductor.gateway_desk import GatewayDesk
from megloom.compute.engines.protocol import EngineUnavailable
from megloom.compute.gateway.protocol import (
    CallEnd,
    CallRequest,
    NoPlace,
    NotAdmitted,
    Placement,
    Sampled,
    flaw,
)
from megloom.compute.graph.meg import ExecutionGraph
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.graph.states import InvocationState
from megloom.compute.rollout.protocol import AgentPlan
from megloom.compute.simulation.clock import run_virtual

EPISODE, ENDS_S, CALL_TIMEOUT_S = "g000001-0000-m000", 100.0, 30.0
ANSWER = Sampled(token_ids=(7, 8), logprobs=(-0.5, -0.25), version_spans=((3, 0, 2),))


class FakeEngine:
    """Says that it lives, and notes what it is asked to abort."""

    token, context_length = "secret", 64

    def __init__(self, cell: str) -> None:
        self.url, self.is_dead, self.aborted = f"http://{cell}", False, list[str]()

    async def info(self) -> None:
        if self.is_dead:
            raise EngineUnavailable(f"{self.url}: connection refused")

    async def abort(self, rid: str) -> None:
        await self.info()
        self.aborted.append(rid)


class Desks:
    """A desk over a real graph and dispatcher, with engines `solver/0`, `solver/1`, … of one slot each."""

    def __init__(self, tasks: asyncio.TaskGroup, num_engines: int, slots: int) -> None:
        clock = asyncio.get_running_loop().time
        self.graph, self.events, self.restarted = ExecutionGraph(), EventLog(clock), list[str]()
        self.dispatcher = Dispatcher(
            run="r",
            graph=self.graph,
            stop_ids={"solver": (0,)},
            call_timeout_s=CALL_TIMEOUT_S,
            tasks=tasks,
            clock=clock,
            events=self.events,
        )
        self.desk = GatewayDesk(
            agents={"solver": AgentPlan(policy="solver", max_tokens=16, temperature=0.8)},
            graph=self.graph,
            dispatcher=self.dispatcher,
            stop_ids={"solver": (0,)},
            call_timeout_s=CALL_TIMEOUT_S,
            clock=clock,
            events=self.events,
        )
        self.dispatcher.lost_engine = self._restart
        self.engines = {f"solver/{number}": FakeEngine(f"solver-{number}") for number in range(num_engines)}
        self.dispatcher.add_engine("solver/spare", policy="solver", capacity=slots)  # never up
        for cell, engine in self.engines.items():
            self.dispatcher.add_engine(cell, policy="solver", capacity=slots)
            self.dispatcher.engine_up(cell, engine)  # type: ignore[arg-type]
        self.desk.open_attempt(
            EPISODE, 0, ends_s=ENDS_S, seed_of=lambda agent, index: derive_seed(agent, index)
        )

    async def _restart(self, cell: str, cause: str) -> None:
        self.restarted.append(cell)

    def kinds(self) -> list[str]:
        return [json.loads(line)["kind"] for line in self.events.take()]

    def assert_idle(self) -> None:
        assert (self.desk.num_open, self.dispatcher.num_lent) == (0, 0)
        for state in (InvocationState.READY, InvocationState.RUNNING, InvocationState.BLOCKED):
            assert self.graph.count("solver", state) == 0


def call(index: int = 0, **changes: Any) -> CallRequest:
    values: dict[str, Any] = {
        "invocation_id": f"{EPISODE}-a0-g{index:03d}",
        "episode_id": EPISODE,
        "attempt": 0,
        "agent": "solver",
        "index": index,
        "parents": (),
        "prompt_ids": (1, 2, 3),
        "messages": ('{"content":"hi","role":"user"}',),
        "max_tokens": 8,
        "temperature": 0.8,
    }
    return CallRequest(**values | changes)


def ended(place: Placement, **changes: Any) -> CallEnd:
    values: dict[str, Any] = {
        "invocation_id": place.invocation_id,
        "rid": place.rid,
        "sampled": ANSWER,
        "finish_reason": "stop",
        "text": "ab",
    }
    return CallEnd(**values | changes)


def with_desk(
    scenario: Callable[[Desks], Coroutine[Any, Any, None]], *, num_engines: int = 1, slots: int = 1
) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            await scenario(Desks(tasks, num_engines, slots))

    run_virtual(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_placed_call_runs_on_its_engine_and_ends_with_all_that_it_got() -> None:
    async def scenario(at: Desks) -> None:
        place = await at.desk.place(call())
        vertex = at.graph[place.invocation_id]
        assert (place.url, place.token, place.engine) == ("http://solver-0", "secret", "solver/0#0")
        assert (place.seed, place.stop_token_ids, place.context_length) == (vertex.seed, (0,), 64)
        assert (vertex.state, vertex.seed) == (InvocationState.RUNNING, derive_seed("solver", 0))
        await at.desk.end(ended(place, leaf_class="sub-agent", unusable="two tokens have no text"))
        assert (vertex.state, vertex.token_ids, vertex.logprobs) == (
            InvocationState.DONE, ANSWER.token_ids, ANSWER.logprobs
        )  # fmt: skip
        assert (vertex.text, vertex.leaf_class, vertex.finish_reason) == ("ab", "sub-agent", "stop")
        assert (vertex.version_spans, vertex.unusable) == (((3, 0, 2),), "two tokens have no text")
        at.assert_idle()
        assert at.desk.close_attempt(EPISODE) == {place.invocation_id}

    with_desk(scenario)


def test_calls_take_their_turn_at_a_full_engine() -> None:
    async def scenario(at: Desks) -> None:
        first = await at.desk.place(call(0))
        second = asyncio.create_task(at.desk.place(call(1)))
        await settle()
        assert not second.done()
        await at.desk.end(ended(first))
        await at.desk.end(ended(await second))
        at.assert_idle()

    with_desk(scenario)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episode_id": "another"}, "over or was never admitted"),
        ({"attempt": 1}, "attempt 0 runs"),
        ({"agent": "painter"}, "no agent 'painter'.*solver"),
        ({"parents": (("unknown", "extends"),)}, "unknown is no call of its episode"),
    ],
)
def test_what_does_not_belong_is_not_admitted_and_leaves_nothing(changes: Any, message: str) -> None:
    async def scenario(at: Desks) -> None:
        with pytest.raises(NotAdmitted, match=message):
            await at.desk.place(call(**changes))
        at.assert_idle()

    with_desk(scenario)


def test_an_id_that_is_taken_is_refused_and_the_first_call_goes_on() -> None:
    async def scenario(at: Desks) -> None:
        place = await at.desk.place(call())
        with pytest.raises(NotAdmitted, match="registered twice"):
            await at.desk.place(call())
        await at.desk.end(ended(place))
        assert at.graph[place.invocation_id].state is InvocationState.DONE

    with_desk(scenario)


def test_a_call_waits_for_its_parents_and_starts_when_they_have_ended() -> None:
    async def scenario(at: Desks) -> None:
        first = await at.desk.place(call(0))
        child = asyncio.create_task(at.desk.place(call(1, parents=((first.invocation_id, "extends"),))))
        await settle()
        assert at.graph[call(1).invocation_id].state is InvocationState.BLOCKED
        await at.desk.end(ended(first))
        await at.desk.end(ended(await child))
        at.assert_idle()

    with_desk(scenario, slots=4)


def test_a_failed_parent_takes_the_calls_that_wait_for_it_along() -> None:
    async def scenario(at: Desks) -> None:
        first = await at.desk.place(call(0))
        child = asyncio.create_task(at.desk.place(call(1, parents=((first.invocation_id, "order"),))))
        await settle()
        await at.desk.end(ended(first, failure="its client left"))
        with pytest.raises(NotAdmitted, match="its parent .*g000 failed"):
            await child
        assert at.graph[first.invocation_id].failure == "its client left"
        at.assert_idle()

    with_desk(scenario, slots=4)


def test_another_place_is_another_request_with_another_seed_and_a_dead_engine_is_restarted() -> None:
    async def scenario(at: Desks) -> None:
        first = await at.desk.place(call())
        dead = first.engine.partition("#")[0]
        at.engines[dead].is_dead = True
        second = await at.desk.replace(first.invocation_id, first.rid, "connection reset")
        await settle()
        assert second.engine.partition("#")[0] != dead and at.restarted == [dead]
        assert second.rid != first.rid and second.seed != first.seed
        assert len(second.rid) == len(first.rid)
        with pytest.raises(NotAdmitted, match="not its current one"):
            await at.desk.replace(first.invocation_id, first.rid, "again")
        await at.desk.end(ended(second))
        assert at.graph[first.invocation_id].num_reentries == 1
        at.assert_idle()

    with_desk(scenario, num_engines=2)


def test_an_engine_that_answers_is_not_restarted_on_a_gateways_word() -> None:
    async def scenario(at: Desks) -> None:
        first = await at.desk.place(call())
        second = await at.desk.replace(first.invocation_id, first.rid, "it aborted")
        assert second.engine == first.engine and at.restarted == []
        await at.desk.end(ended(second))
        at.assert_idle()

    with_desk(scenario)


def test_a_call_that_lost_three_places_fails_and_ending_it_once_more_is_harmless() -> None:
    async def scenario(at: Desks) -> None:
        place = await at.desk.place(call())
        for _ in range(2):
            place = await at.desk.replace(place.invocation_id, place.rid, "it aborted")
        with pytest.raises(NoPlace, match="lost 3 places, the last one to: it aborted"):
            await at.desk.replace(place.invocation_id, place.rid, "it aborted")
        assert at.graph[place.invocation_id].state is InvocationState.FAILED
        await at.desk.end(ended(place, failure="no place"))
        assert "gateway_late" not in at.kinds()
        at.assert_idle()

    with_desk(scenario)


def test_a_call_that_gets_no_place_says_at_the_deadline_what_it_waited_for() -> None:
    async def scenario(at: Desks) -> None:
        at.dispatcher.engine_down("solver/0", "killed")
        with pytest.raises(NoPlace, match="waiting for a place on one of 0 engines of policy solver"):
            await at.desk.place(call())
        assert asyncio.get_running_loop().time() == ENDS_S
        assert at.graph[call().invocation_id].state is InvocationState.FAILED
        at.assert_idle()

    with_desk(scenario)


def test_a_caller_that_stops_waiting_leaves_no_place_behind() -> None:
    async def scenario(at: Desks) -> None:
        first = await at.desk.place(call(0))
        leaving = [asyncio.create_task(at.desk.place(call(number))) for number in (1, 2)]
        await settle()
        leaving[0].cancel()
        await at.desk.end(ended(first))  # the place that is free goes to the one that left, or past it
        leaving[1].cancel()
        for task in leaving:
            with pytest.raises(asyncio.CancelledError):
                await task
        at.assert_idle()
        assert at.graph[call(1).invocation_id].failure == "its client left before it had a place"

    with_desk(scenario)


def test_an_end_without_a_place_wakes_who_waits_for_one() -> None:
    async def scenario(at: Desks) -> None:
        await at.desk.place(call(0))
        waiting = asyncio.create_task(at.desk.place(call(1)))
        await settle()
        unplaced = CallEnd(
            invocation_id=call(1).invocation_id, rid=None, sampled=Sampled(), finish_reason="", text="",
            failure="its client left",
        )  # fmt: skip
        await at.desk.end(unplaced)
        with pytest.raises(NotAdmitted, match="its client left"):
            await waiting
        assert at.desk.num_open == 1

    with_desk(scenario)


def test_closing_an_attempt_aborts_its_requests_frees_its_places_and_makes_the_rest_late() -> None:
    async def scenario(at: Desks) -> None:
        running = await at.desk.place(call(0))
        waiting = asyncio.create_task(at.desk.place(call(1)))
        await settle()
        assert at.desk.close_attempt(EPISODE) == {call(0).invocation_id, call(1).invocation_id}
        with pytest.raises(NotAdmitted, match="its episode is over"):
            await waiting
        await settle()
        assert at.engines["solver/0"].aborted == [running.rid]
        at.assert_idle()
        assert [vertex.state for vertex in at.graph.take(EPISODE)] == [InvocationState.CANCELLED] * 2
        at.kinds()
        await at.desk.end(ended(running))
        with pytest.raises(NotAdmitted):
            await at.desk.replace(running.invocation_id, running.rid, "gone")
        with pytest.raises(NotAdmitted):
            await at.desk.place(call(2))
        assert at.kinds() == ["gateway_late"] * 3

    with_desk(scenario)


def test_a_freed_place_never_goes_to_a_call_of_the_attempt_that_closes() -> None:
    async def scenario(at: Desks) -> None:
        await at.desk.place(call(0))
        waiting = [asyncio.create_task(at.desk.place(call(number))) for number in (1, 2, 3)]
        await settle()
        at.desk.close_attempt(EPISODE)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert {v.started_s for v in at.graph.take(EPISODE)[1:]} == {None}
        at.assert_idle()

    with_desk(scenario)


def test_a_fenced_engine_loses_its_leases_and_the_call_moves_on() -> None:
    async def scenario(at: Desks) -> None:
        first = await at.desk.place(call())
        cell = first.engine.partition("#")[0]
        at.dispatcher.engine_down(cell, "it changes its role")
        await settle()
        assert at.engines[cell].aborted == [first.rid]  # so that the gateway asks for another place
        second = await at.desk.replace(first.invocation_id, first.rid, "it aborted")
        assert second.engine.partition("#")[0] != cell and at.restarted == []
        await at.desk.end(ended(second))
        at.assert_idle()

    with_desk(scenario, num_engines=2)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_place_that_is_held_too_long_is_aborted_and_an_engine_that_ignores_that_is_lost(
    is_dead: bool,
) -> None:
    async def scenario(at: Desks) -> None:
        place = await at.desk.place(call())
        at.engines["solver/0"].is_dead = is_dead
        await asyncio.sleep(CALL_TIMEOUT_S + 1.0)
        assert (at.engines["solver/0"].aborted, at.restarted) == (
            ([], ["solver/0"]) if is_dead else ([place.rid], [])
        )
        at.desk.close_attempt(EPISODE)
        at.assert_idle()

    with_desk(scenario)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        (Sampled(), "sampled no token"),
        (
            Sampled(token_ids=(1, 2), logprobs=(-1.0,), version_spans=((3, 0, 2),)),
            "2 token ids came with 1 log-prob",
        ),
        (
            Sampled(token_ids=(1,), logprobs=(math.nan,), version_spans=((3, 0, 1),)),
            "not a finite number",
        ),
        (Sampled(token_ids=(1,), logprobs=(-1.0,)), "spans [] do not cover 1 tokens"),
        (
            Sampled(token_ids=(1, 2), logprobs=(-1.0, -1.0), version_spans=((3, 0, 1), (4, 0, 2))),
            "do not cover 2 tokens in order",
        ),
    ],
)
def test_an_answer_whose_parts_disagree_is_kept_without_them_and_marked(
    sampled: Sampled, message: str
) -> None:
    async def scenario(at: Desks) -> None:
        place = await at.desk.place(call())
        child = asyncio.create_task(at.desk.place(call(1, parents=((place.invocation_id, "extends"),))))
        await settle()
        await at.desk.end(ended(place, sampled=sampled))
        vertex = at.graph[place.invocation_id]
        assert (vertex.state, vertex.failure) == (InvocationState.DONE, None)
        assert message in (vertex.unusable or "")
        assert (vertex.token_ids, vertex.logprobs, vertex.version_spans) == (sampled.token_ids, (), ())
        assert "call_unusable" in at.kinds()
        await at.desk.end(ended(await child))  # its prompt holds what the client saw
        assert at.graph[call(1).invocation_id].unusable is None
        at.assert_idle()

    assert message in (flaw(sampled) or "") and flaw(ANSWER) is None
    with_desk(scenario)


def test_an_end_with_a_request_that_is_not_the_current_one_is_no_answer() -> None:
    async def scenario(at: Desks) -> None:
        first = await at.desk.place(call())
        await at.desk.replace(first.invocation_id, first.rid, "it aborted")
        await at.desk.end(ended(first))
        assert "its place was for" in (at.graph[first.invocation_id].failure or "")
        at.assert_idle()

    with_desk(scenario)
