"""Tool calls and thinking are found in a growing text; how it is cut does not matter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.gateway.protocol import Delta
from megloom.compute.gateway.tool_calls import (
    MARKERS,
    Answer,
    AnswerParser,
    call_id,
    join_deltas,
    parse_answer,
)

READ = '<tool_call>\n{"name": "read", "arguments": {"path":  "a"}}\n</tool_call>'


def parse(text: str, **options: bool) -> Answer:
    return parse_answer(text, "i0", **options)


def calls(answer: Answer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


def test_thinking_text_and_calls_are_told_apart() -> None:
    answer = parse(f"<think>\nfirst <tool_call> then\n</think>\n\nI read.\n{READ}\n{READ}")
    assert (answer.reasoning, answer.text) == ("first <tool_call> then", "I read.")
    assert calls(answer) == [("read", '{"path":  "a"}')] * 2, "arguments as the model wrote them"
    assert [call.call_id for call in answer.tool_calls] == [call_id("i0", 0), call_id("i0", 1)]


def test_call_ids_follow_from_the_call_and_the_place() -> None:
    ids = [call_id(name, position) for name in ("i0", "i1") for position in (0, 1)]
    assert len(set(ids)) == 4 and all(len(one) <= 40 and one.replace("_", "").isalnum() for one in ids)
    assert ids[0] == call_id("i0", 0)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "read", "arguments": {"path": "a"}',
        '{"name": "read", "arguments": "a"}',
        '{"name": "read", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "read"} {"name": "read"}',
        '{"name": "read",}',
        '{"name" "read"}',
        '{3: "read"}',
        '{"name": "read", "arguments": {"x": NaN}}',
        '["read"]',
        "",
        "{",
        '{"name": "read", "arguments": ' + "[" * 50_000,
    ],
)
def test_malformed_calls_stay_text_and_the_next_one_is_found(body: str) -> None:
    malformed = f"<tool_call>\n{body}\n</tool_call>"
    answer = parse(f"so\n{malformed}\n{READ}")
    assert answer.text == f"so\n{malformed}"
    assert calls(answer) == [("read", '{"path":  "a"}')]


def test_a_call_without_arguments_has_none() -> None:
    assert calls(parse('<tool_call>{"name": "stop"}</tool_call>')) == [("stop", "{}")]


def test_arguments_may_speak_of_the_marker() -> None:
    arguments = json.dumps({"text": 'a </tool_call> "b" \\'})
    answer = parse(f'<tool_call>{{"arguments": {arguments}, "name" : "write"}}</tool_call>!')
    assert (calls(answer), answer.text) == ([("write", arguments)], "!")


def test_a_call_that_never_ends_stays_text_and_hides_no_later_one() -> None:
    assert parse('a <tool_call>{"name": "re') == Answer(
        text='a <tool_call>{"name": "re', reasoning="", tool_calls=()
    )
    answer = parse(f'<tool_call>{{"name": "re</tool_call>{READ}')
    assert answer.text == '<tool_call>{"name": "re</tool_call>' and len(answer.tool_calls) == 1


def test_without_tools_calls_are_text() -> None:
    assert parse(f"<think>x</think>{READ}", has_tools=False) == Answer(
        text=READ, reasoning="x", tool_calls=()
    )


def test_thinking_that_the_prompt_opened_needs_no_marker() -> None:
    answer = parse("\nhm\n</think>\n\nyes", in_reasoning=True)
    assert (answer.reasoning, answer.text) == ("hm", "yes")
    assert parse("cut <thi", in_reasoning=True).reasoning == "cut <thi"


def test_only_what_stands_first_is_thinking() -> None:
    assert parse("use <think> tags </think>").text == "use <think> tags </think>"
    assert parse(f"{READ}<think>x").text == "<think>x"
    assert parse("\n <think>x</think>").reasoning == "x"


def test_space_around_an_answer_without_markers_is_kept() -> None:
    assert parse(" \n a  b \n").text == " \n a  b \n"


def test_a_lone_surrogate_in_a_name_becomes_the_replacement_character() -> None:
    escaped = '{"path": "\\ud800"}'
    answer = parse(f'<tool_call>{{"name": "\\ud800", "arguments": {escaped}}}</tool_call>')
    assert calls(answer) == [("\ufffd", escaped)]


def test_nothing_that_may_become_a_marker_is_let_out() -> None:
    parser = AnswerParser("i0")
    assert parser.feed("a <tool") == [Delta(text="a")]
    assert parser.feed("box") == [Delta(text=" <toolbox")]
    assert parser.feed(" <tool_call>{") == []
    assert parser.finish() == [Delta(text=" <tool_call>"), Delta(text="{")]


def test_a_call_is_let_out_when_it_ends() -> None:
    parser = AnswerParser("i0")
    assert parser.feed(READ[:-1]) == []
    (delta,) = parser.feed(READ[-1])
    assert delta.tool_call is not None and delta.tool_call.name == "read"
    assert parser.finish() == []


PIECES = st.sampled_from(
    [*MARKERS, READ, " ", "\n", "a", "<", "<t", '"', "\\", "{", '{"name": "f"}', '{"name": "</tool_call>"}']
)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=9),
    cuts=st.lists(st.integers(1, 12), max_size=30),
    in_reasoning=st.booleans(),
    has_tools=st.booleans(),
)
def test_any_cut_of_a_text_gives_the_same_answer(
    pieces: list[str], cuts: list[int], in_reasoning: bool, has_tools: bool
) -> None:
    text = "".join(pieces)
    parser = AnswerParser("i0", in_reasoning=in_reasoning, has_tools=has_tools)
    deltas = []
    for size in [*cuts, len(text) + 1]:
        deltas += parser.feed(text[:size])
        text = text[size:]
    deltas += parser.finish()
    whole = parse("".join(pieces), in_reasoning=in_reasoning, has_tools=has_tools)
    assert join_deltas(deltas) == whole
    assert all(bool(delta.text) + bool(delta.reasoning) + bool(delta.tool_call) == 1 for delta in deltas)
    if not whole.tool_calls and not any(marker in "".join(pieces) for marker in MARKERS):
        assert whole.text + whole.reasoning == (
            "".join(pieces).lstrip(" \n") if in_reasoning else "".join(pieces)
        )
