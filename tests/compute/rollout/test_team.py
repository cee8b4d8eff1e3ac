"""The team handle: calls are registered at once, edges follow arguments, prompts wait for answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megloom.compute.graph.seeds import canonical_json
from megloom.compute.rollout.chat import ChatError
from megloom.compute.rollout.team import CallBook, TeamHandle
from megloom.compute.workload import CallFailed

from .builders import RecordedEvents, agent, answer, book


def run(test: Any) -> None:
    asyncio.run(test())


def test_a_call_is_announced_with_its_prompt_at_once() -> None:
    async def body() -> None:
        events = RecordedEvents()
        TeamHandle(book(events)).planner("1+2")
        (opened,) = events.opened
        assert opened.agent == "planner" and opened.parents == () and opened.prompt_ids == tuple(b"1+2")

    run(body)


def test_a_call_that_takes_a_pending_call_is_announced_with_an_edge_and_without_a_prompt() -> None:
    async def body() -> None:
        events = RecordedEvents()
        team = TeamHandle(book(events))
        team.solver("1+2", team.planner("1+2"))
        child = events.opened[1]
        assert child.parents == (("g1-m000-a0-i000", "data"),) and child.prompt_ids is None

    run(body)


def said(text: str, role: str = "user") -> str:
    return canonical_json({"role": role, "content": text})


def test_a_prompt_is_announced_with_its_messages_whether_it_waited_or_not() -> None:
    async def body() -> None:
        events = RecordedEvents()
        chatty = agent(
            lambda *parts: [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": parts[-1], "name": "é"},
            ]
        )
        calls = book(events, planner=agent(), solver=chatty)
        team = TeamHandle(calls)
        team.solver("1+2", team.planner("1+2"))
        assert [opened.messages for opened in events.opened] == [(said("1+2"),), ()]
        calls.receive(answer("g1-m000-a0-i000", "add"))
        named = canonical_json({"role": "user", "content": "add", "name": "é"})
        assert events.prompts[0].messages == (said("be brief", "system"), named)
        assert events.prompts[0].prompt_ids == tuple(b"be briefadd")

    run(body)


def test_a_message_that_is_no_json_fails_its_call_by_its_position() -> None:
    async def body() -> None:
        bad = agent(lambda text: [{"role": "user", "content": text, "image": b"x"}])
        with pytest.raises(ChatError, match="message 0: cannot be recorded as JSON .*bytes"):
            TeamHandle(book(RecordedEvents(), planner=bad)).planner("a")

    run(body)


def test_an_answer_renders_the_prompts_of_the_calls_that_waited_for_it() -> None:
    async def body() -> None:
        events = RecordedEvents()
        calls = book(events)
        team = TeamHandle(calls)
        team.solver("1+2", team.planner("1+2"))
        calls.receive(answer("g1-m000-a0-i000", "add"))
        assert events.prompts[0].prompt_ids == tuple(b"1+2 add")

    run(body)


def test_a_call_with_two_parents_is_rendered_with_the_last_answer_whatever_the_order() -> None:
    async def body() -> None:
        for order in ((0, 1), (1, 0)):
            events = RecordedEvents()
            calls = book(events)
            team = TeamHandle(calls)
            parents = [team.planner("a"), team.planner("b")]
            team.verifier(*parents)
            calls.receive(answer(parents[order[0]].invocation_id))
            assert events.prompts == []
            calls.receive(answer(parents[order[1]].invocation_id))
            assert len(events.prompts) == 1

    run(body)


def test_calls_inside_lists_and_mappings_are_edges_too() -> None:
    async def body() -> None:
        events = RecordedEvents()
        team = TeamHandle(book(events, planner=agent(), verifier=agent(lambda *parts: str(parts))))
        first, second = team.planner("a"), team.planner("b")
        team.verifier([first], {"x": second})
        assert [parent for parent, _ in events.opened[2].parents] == [
            first.invocation_id,
            second.invocation_id,
        ]

    run(body)


def test_after_makes_an_order_edge() -> None:
    async def body() -> None:
        events = RecordedEvents()
        team = TeamHandle(book(events))
        first = team.planner("a")
        team.solver("b", after=[first])
        assert events.opened[1].parents == ((first.invocation_id, "order"),)

    run(body)


def test_several_may_await_one_call_and_it_returns_itself() -> None:
    async def body() -> None:
        calls = book(RecordedEvents())
        call = TeamHandle(calls).planner("a")

        async def waits() -> Any:
            return await call

        waiting = [asyncio.create_task(waits()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        calls.receive(answer(call.invocation_id, "b"))
        assert await waiting[1] is call and await waiting[2] is call and call.text == "b"

    run(body)


def test_a_failed_call_raises_with_the_agent_and_the_cause() -> None:
    async def body() -> None:
        calls = book(RecordedEvents())
        call = TeamHandle(calls).planner("a")
        calls.receive(answer(call.invocation_id, failure="engine gone"))
        with pytest.raises(CallFailed, match=r"planner call .*engine gone"):
            await call

    run(body)


def test_an_unknown_agent_is_refused_with_the_nearest_name() -> None:
    async def body() -> None:
        with pytest.raises(AttributeError, match="no agent 'solvr', did you mean 'solver'"):
            TeamHandle(book(RecordedEvents())).solvr("a")

    run(body)


def test_reading_the_text_of_a_pending_call_says_to_await_it() -> None:
    async def body() -> None:
        call = TeamHandle(book(RecordedEvents())).planner("a")
        with pytest.raises(RuntimeError, match="pending: await it"):
            _ = call.text

    run(body)


def test_a_prompt_that_quotes_an_answer_without_an_edge_is_warned_of() -> None:
    async def body() -> None:
        calls: CallBook = book(RecordedEvents())
        team = TeamHandle(calls)
        plan = team.planner("a")
        calls.receive(answer(plan.invocation_id, "first add, then subtract the rest"))
        team.solver("do: " + plan.text)
        assert len(calls.warnings) == 1 and "without an edge" in calls.warnings[0]
        team.solver("do: ", plan)
        assert len(calls.warnings) == 1

    run(body)


def test_a_prompt_function_that_raises_fails_its_call_and_those_that_wait_for_it() -> None:
    async def body() -> None:
        def broken(*parts: str) -> str:
            raise KeyError("nothing")

        calls = book(RecordedEvents(), planner=agent(), solver=agent(broken))
        team = TeamHandle(calls)
        plan = team.planner("a")
        solver = team.solver(plan)
        last = team.planner(solver)
        calls.receive(answer(plan.invocation_id))
        with pytest.raises(CallFailed, match="prompt raised KeyError"):
            await solver
        with pytest.raises(CallFailed, match="its parent .* failed: its prompt raised KeyError"):
            await last

    run(body)
