"""Messages lose their client's dress and keep what makes them the same."""

from __future__ import annotations

from typing import Any

import pytest

from megloom.compute.gateway.messages import MessageError, call_ids, message_key, plain_messages

from .toys import assistant, call, tool_result, user


def key(message: dict[str, Any], *known: str) -> str:
    return message_key(plain_messages([message])[0], known)


def test_the_plain_form_has_texts_and_objects_and_nothing_of_the_client() -> None:
    given = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "reasoning_content": "hm",
        "tool_calls": [{**call("c1", "read", '{"b": 1, "a": "é"}'), "index": 0}, call("c2", "stop", " ")],
    }
    developer = {"role": "developer", "content": ["a", {"type": "text", "text": "b"}], "name": "x"}
    plain = plain_messages([developer, given])
    assert plain == [
        {"role": "system", "content": "ab", "name": "x"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "read", "arguments": {"b": 1, "a": "é"}},
                },
                {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": {}}},
            ],
        },
    ]
    assert list(plain[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"], "in the model's order"
    assert plain_messages(plain) == plain
    assert call_ids(plain[1]) == ["c1", "c2"] and call_ids(plain[0]) == []


@pytest.mark.parametrize("arguments", ["{not json", "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    (plain,) = plain_messages([assistant("", call("c", "f", arguments))])
    assert plain["tool_calls"][0]["function"]["arguments"] == arguments


def test_equal_messages_have_equal_keys_however_they_are_dressed() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "output_text", "text": "b"}]
    assert key(user(parts)) == key(user("ab"))
    assert key(user("ab", "developer")) == key(user("ab", "system"))
    assert key({**assistant("ab"), "audio": None, "reasoning_content": "x"}) == key(assistant(" ab\n"))
    assert key(assistant(None, call("c", "f", '{"a":1, "b":2}'))) == key(
        assistant("", call("c", "f", '{"b": 2,"a": 1}'))
    )


def test_arguments_of_a_known_call_do_not_count_and_those_of_others_do() -> None:
    one, other = (assistant("", call("c", "f", text)) for text in ('{"a": 1}', "{broken"))
    assert key(one, "c") == key(other, "c")
    assert key(one) != key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), user("b")),
        (user("a"), user("a ")),
        (user("a"), user("a", "system")),
        (tool_result("c1", "a"), tool_result("c2", "a")),
        (assistant("", call("c1", "f", "{}")), assistant("", call("c2", "f", "{}"))),
        (assistant("", call("c1", "f", "{}")), assistant("", call("c1", "g", "{}"))),
        (assistant("a"), assistant("a", call("c1", "f", "{}"))),
        (user("\ud800"), user("\ud801")),
    ],
)
def test_different_messages_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key(one, "c1", "c2") != key(other, "c1", "c2")


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ({"content": "a"}, "expected a mapping with a role"),
        ("a", "expected a mapping with a role"),
        (user(3), "content must be a text or parts, got 3"),
        (user([{"type": "image_url"}]), "got one of type 'image_url'"),
        (user([{"type": "text"}]), "got one of type 'text'"),
        (user([7]), "got one of type 'int'"),
        ({**assistant(""), "function_call": {"name": "f"}}, "function_call is not served"),
        ({**assistant(""), "tool_calls": [{"id": "c"}]}, "a tool call needs function.name"),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_its_place(message: Any, cause: str) -> None:
    with pytest.raises(MessageError, match=f"message 1: .*{cause}"):
        plain_messages([user("x"), message])
