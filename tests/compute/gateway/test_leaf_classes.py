"""Calls of a program are told apart by what they show: its main agent's, its helpers', and summaries."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from megloom.compute.gateway.leaf_classes import CLASSIFIERS, AllMain, CodingHarness, LeafClass
from megloom.compute.rollout.samples import LEAF_CLASSES

from .toys import assistant, tool, user

MAIN = [user("You are the assistant. Today is Monday.", "system"), user("fix the bug")]
HELPER = [user("You search files.", "system"), user("find the bug")]
TOOLS = [tool("read"), tool("start_helper")]
SUMMARY = user("Your task is to create a detailed summary of the conversation so far.")


def classes(*calls: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> list[str]:
    classifier = CodingHarness()
    return [classifier.classify(messages, tools, at) for at, (messages, tools) in enumerate(calls)]


def test_the_classes_are_those_that_samples_rank() -> None:
    assert get_args(LeafClass) == LEAF_CLASSES


def test_the_main_agent_and_its_helper_take_turns() -> None:
    longer = [*MAIN, assistant("a"), user("b")]
    assert classes((MAIN, TOOLS), (HELPER, [tool("read")]), (longer, TOOLS), (HELPER, [tool("read")])) == [
        "main",
        "sub-agent",
        "main",
        "sub-agent",
    ]


def test_a_helper_with_all_tools_is_known_by_its_system_prompt() -> None:
    assert classes((MAIN, TOOLS), (HELPER, TOOLS)) == ["main", "sub-agent"]


def test_a_helper_with_the_same_system_prompt_is_known_by_its_fewer_tools() -> None:
    assert classes((MAIN, TOOLS), (MAIN, TOOLS[:1]), (MAIN, [])) == ["main", "sub-agent", "sub-agent"]


def test_the_main_agent_may_gain_tools_and_its_prompt_may_end_otherwise() -> None:
    changed = [user("You are the assistant." + " " * 400 + "Tuesday", "system"), user("fix")]
    same = [user("You are the assistant." + " " * 400 + "Monday", "system"), user("fix")]
    assert classes((same, TOOLS), (changed, [*TOOLS, tool("write")])) == ["main", "main"]


def test_a_title_asked_before_the_first_call_with_tools_is_not_the_main_agents() -> None:
    title = [user("Write a title.", "system"), user("fix the bug")]
    assert classes((title, []), (MAIN, TOOLS)) == ["sub-agent", "main"]


@pytest.mark.parametrize("tools", [TOOLS, []])
def test_a_summary_belongs_to_the_conversation_that_it_sums_up(tools: list[dict[str, Any]]) -> None:
    of_main = [user("You sum up.", "system"), *MAIN[1:], assistant("a"), SUMMARY]
    of_helper = [user("You sum up.", "system"), *HELPER[1:], assistant("a"), SUMMARY]
    found = classes((MAIN, TOOLS), (HELPER, TOOLS), (of_main, tools), (of_helper, tools))
    assert found[2:] == ["main-summary", "sub-agent-summary"]
    assert classes((MAIN, TOOLS), ([*MAIN, assistant("a"), SUMMARY], TOOLS))[1] == "main-summary"


def test_going_on_from_a_summary_is_no_summary() -> None:
    compacted = [MAIN[0], user("This session goes on from one that ran out: the bug is fixed.")]
    assert classes((MAIN, TOOLS), (compacted, TOOLS)) == ["main", "main"]
    asked_before = [*MAIN, assistant("a"), SUMMARY, assistant("b"), user("c")]
    assert classes((MAIN, TOOLS), (asked_before, TOOLS)) == ["main", "main"]


def test_by_default_every_call_is_the_main_agents() -> None:
    assert AllMain().classify([SUMMARY], [], 3) == "main"
    assert {name: type(make()) for name, make in CLASSIFIERS.items()} == {
        "all_main": AllMain,
        "coding_harness": CodingHarness,
    }
