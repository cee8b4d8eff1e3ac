"""Messages of prompts: each kept once per episode, and read back as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.graph.messages import Messages, by_id, message_records, read_messages
from megloom.compute.graph.seeds import canonical_json


def said(role: str, content: Any, **more: Any) -> str:
    return canonical_json({"role": role, "content": content, **more})


def records_of(**prompts: list[str]) -> Messages:
    return message_records(prompts, episode_id="e", run="r", step=3)


def test_sixty_turns_of_a_growing_conversation_keep_each_message_once() -> None:
    turns = [said("user" if turn % 2 == 0 else "assistant", f"turn {turn}") for turn in range(120)]
    prompts = {f"i{turn:03d}": turns[: 2 * turn + 1] for turn in range(60)}
    kept = message_records(prompts, episode_id="e", run="r", step=3)
    assert [record.content for record in kept.records] == turns[:119]
    index = by_id(kept.records)
    for name, prompt in prompts.items():
        assert [canonical_json(m) for m in read_messages(index, kept.last[name])] == prompt


def test_every_field_of_a_message_comes_back() -> None:
    tool = said("assistant", None, tool_calls=[{"id": 2**70, "arguments": "{}"}], name="é\ud800")
    kept = records_of(a=[said("system", "be brief"), tool])
    assert canonical_json(read_messages(kept.records, kept.last["a"])[1]) == tool
    assert [(r.role, r.episode_id, r.run, r.step) for r in kept.records] == [
        ("system", "e", "r", 3),
        ("assistant", "e", "r", 3),
    ]


def test_the_same_text_at_another_place_is_another_message() -> None:
    hi = said("user", "hi")
    kept = records_of(a=[hi, hi], b=[said("system", "x"), hi])
    assert len(kept.records) == 4 and len(set(kept.last.values())) == 2
    assert read_messages(kept.records, kept.last["b"])[0]["role"] == "system"


def test_two_attempts_with_the_same_messages_give_the_same_records() -> None:
    prompt = [said("system", "x"), said("user", "y")]
    assert records_of(a=prompt).records == records_of(b=prompt, c=prompt[:1]).records


def test_a_call_without_messages_has_no_last_one() -> None:
    assert records_of(a=[], b=[said("user", "y")]).last.keys() == {"b"}


def test_a_missing_message_is_named() -> None:
    kept = records_of(a=[said("system", "x"), said("user", "y")])
    first, second = kept.records
    with pytest.raises(ValueError, match=f"prompt {second.message_id}: message {first.message_id} is not"):
        read_messages([second], second.message_id)


def test_a_chain_that_runs_in_a_circle_is_named() -> None:
    first, second = records_of(a=[said("system", "x"), said("user", "y")]).records
    with pytest.raises(ValueError, match="follows itself"):
        read_messages([replace(first, parent=second.message_id), second], second.message_id)
