"""A request that goes on from a known answer keeps its ids; rewriting the past makes a branch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.gateway.history import History, Matched
from megloom.compute.gateway.messages import MessageError, plain_messages
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.gateway.tool_calls import parse_answer

from . import toys
from .toys import assistant, call, tool, tool_result, toy, user

END = "<|im_end|>"


class Session:
    """A client and its history: `ask` sends messages, the model writes the given pieces of text."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template, self.history = template, History(template)
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.sampled: dict[str, tuple[int, ...]] = {}

    def match(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> Matched:
        return self.history.match(messages, tools)

    def ask(
        self,
        name: str,
        messages: Sequence[dict[str, Any]],
        *pieces: str,
        tools: Sequence[dict[str, Any]] = (),
        prompt: Matched | None = None,
    ) -> dict[str, Any]:
        """The reply, as the client gets it. Each piece is encoded alone, as a model may write it."""
        matched = prompt or self.match(messages, tools)
        sampled = tuple(token for piece in pieces for token in self.template.encode(piece))
        text = self.template.decode(self.template.without_stop(sampled))
        answer = parse_answer(text, name, in_reasoning=self.template.opens_reasoning)
        calls = [call(one.call_id, one.name, one.arguments) for one in answer.tool_calls]
        reply = assistant(answer.text, *calls)
        self.history.add(
            invocation_id=name,
            messages=messages,
            tools=tools,
            prompt_ids=matched.prompt_ids,
            sampled_ids=sampled,
            reply=[reply],
        )
        self.prompts[name], self.sampled[name] = matched.prompt_ids, sampled
        return reply

    def path(self, name: str) -> tuple[int, ...]:
        return self.prompts[name] + self.sampled[name]

    def continues(self, matched: Matched, name: str, suffix: str) -> bool:
        """The prompt is the path of `name` and the ids of `suffix`, which is said to be so."""
        return matched == Matched(
            prompt_ids=self.path(name) + self.template.encode(suffix), parent_invocation=name, kind="extends"
        )


def fresh(session: Session, messages: list[dict[str, Any]]) -> tuple[int, ...]:
    return session.template.encode(session.template.render(plain_messages(messages)))


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(toy(tmp_path))


def test_two_sampled_tokens_that_would_be_encoded_as_one_stay_two(session: Session) -> None:
    reply = session.ask("i0", [user("x")], "he", "llo", END)
    assert reply["content"] == "hello" and len(session.sampled["i0"]) == 3
    matched = session.match([user("x"), reply, user("y")])
    assert session.continues(matched, "i0", "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n")
    assert matched.prompt_ids != fresh(session, [user("x"), reply, user("y")])


def test_the_separator_between_turns_is_kept(session: Session) -> None:
    messages = [user("x")]
    messages += [session.ask("i0", messages, "hello", END), user("y")]
    matched = session.match(messages)
    assert matched.prompt_ids == fresh(session, messages)
    assert session.template.decode_all(matched.prompt_ids) == session.template.render(messages)


def test_space_that_a_template_puts_before_its_end_of_turn_does_not_end_the_turn_twice(
    tmp_path: Path,
) -> None:
    session = Session(toy(tmp_path, toys.SPACED))
    reply = session.ask("i0", [user("x")], "hello", END)
    matched = session.match([user("x"), reply, user("y")])
    assert session.continues(matched, "i0", "<|im_start|> user\ny <|im_end|><|im_start|> assistant\n")


def test_an_answer_cut_by_length_gets_the_templates_end_of_turn(session: Session) -> None:
    reply = session.ask("i0", [user("x")], "he")
    matched = session.match([user("x"), reply, user("y")])
    assert session.continues(
        matched, "i0", "<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_stop_token_than_the_templates_stays_and_the_template_goes_on(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, stops=(END, "<|endoftext|>")))
    reply = session.ask("i0", [user("x")], "he", "<|endoftext|>")
    matched = session.match([user("x"), reply, user("y")])
    assert session.continues(
        matched, "i0", "<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_empty_answer_is_continued(session: Session) -> None:
    reply = session.ask("i0", [user("x")], END)
    assert session.match([user("x"), reply, user("y")]).kind == "extends"


@pytest.mark.parametrize(
    "sent_back",
    [
        {"role": "assistant", "content": "hello", "refusal": None, "audio": None, "annotations": []},
        {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
        {"role": "assistant", "content": " hello\n", "reasoning_content": "hm"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "assistant", "content": "hello", "tool_calls": None, "function_call": None},
    ],
)
def test_fields_that_clients_add_or_drop_do_not_matter(session: Session, sent_back: dict[str, Any]) -> None:
    session.ask("i0", [user("x")], "he", "llo", END)
    first = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": None}]}
    matched = session.match([first, sent_back, user("y")])
    assert session.continues(matched, "i0", "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n")


def test_an_edited_answer_is_none_of_ours(session: Session) -> None:
    session.ask("i0", [user("x")], "hello", END)
    messages = [user("x"), assistant("hullo"), user("y")]
    assert session.match(messages) == Matched(
        prompt_ids=fresh(session, messages),
        parent_invocation=None,
        kind="new",
        reason="its answers are none of the known ones",
    )


RAW_CALL = '<tool_call>\n{"name":  "read", "arguments": {"b":1, "path": "a"}}\n</tool_call>'


def test_a_tool_call_that_the_client_wrote_anew_keeps_its_ids(session: Session) -> None:
    tools = [tool("read")]
    reply = session.ask("i0", [user("x")], "so\n", RAW_CALL, END, tools=tools)
    sent_back = json.loads(json.dumps(reply))
    sent_back["tool_calls"][0]["function"]["arguments"] = '{"path":"a","b":1}'
    sent_back["content"] = [{"type": "text", "text": "so"}]
    result = tool_result(reply["tool_calls"][0]["id"], "42")
    matched = session.match([user("x"), sent_back, result], tools)
    assert session.continues(
        matched,
        "i0",
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    )


def test_a_known_tool_call_in_a_new_conversation_is_shown_as_the_model_wrote_it(session: Session) -> None:
    tools = [tool("read")]
    reply = session.ask("i0", [user("x")], RAW_CALL, END, tools=tools)
    result = tool_result(reply["tool_calls"][0]["id"], "42")
    matched = session.match([user("summary of before"), reply, result], tools)
    assert matched.kind == "new"
    assert RAW_CALL in session.template.decode_all(matched.prompt_ids)


def test_a_known_tool_call_is_shown_with_the_thinking_that_its_prompt_had_opened(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, toys.THINKING))
    reply = session.ask("i0", [user("x")], f"hm\n</think>\n\n{RAW_CALL}", END)
    result = tool_result(reply["tool_calls"][0]["id"], "42")
    matched = session.match([user("summary of before"), reply, result])
    shown = f"<|im_start|>assistant\n<think>\nhm\n</think>\n\n{RAW_CALL}<|im_end|>\n"
    assert shown in session.template.decode_all(matched.prompt_ids)


def test_a_known_tool_call_beside_another_text_is_shown_as_the_client_sent_it(session: Session) -> None:
    reply = session.ask("i0", [user("x")], "so\n", RAW_CALL, END, tools=[tool("read")])
    matched = session.match([user("x"), {**reply, "content": "edited"}, user("y")], [tool("read")])
    text = session.template.decode_all(matched.prompt_ids)
    assert "edited" in text and RAW_CALL not in text


def test_calls_of_others_with_the_same_ids_but_other_arguments_are_not_the_same(session: Session) -> None:
    one = [user("x"), assistant("", call("c", "read", '{"path": "a"}')), tool_result("c", "1")]
    other = [user("x"), assistant("", call("c", "read", '{"path": "b"}')), tool_result("c", "1")]
    reply = session.ask("i0", one, "hello", END)
    assert session.match([*one, reply, user("y")]).kind == "extends"
    assert session.match([*other, reply, user("y")]).kind == "new"


def test_a_template_that_drops_old_thinking_makes_a_branch(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, toys.FORGETFUL))
    messages = [user("x")]
    reply = session.ask("i0", messages, "<think>\nhm\n</think>\n\n", "he", "llo", END)
    assert reply["content"] == "hello"
    tool_loop = session.match([*messages, reply, tool_result("c", "1")])
    assert tool_loop.kind == "extends", "thinking stays while tools answer"
    messages += [reply, user("y")]
    assert session.match(messages) == Matched(
        prompt_ids=fresh(session, messages),
        parent_invocation="i0",
        kind="branch",
        reason="the template drops the thinking of i0",
    )


def test_thinking_dropped_further_back_makes_a_branch_too(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, toys.FORGETFUL))
    messages = [user("x")]
    messages += [session.ask("i0", messages, "<think>\nhm\n</think>\n\nhe", END), tool_result("c", "1")]
    messages += [session.ask("i1", messages, "hello", END), user("y")]
    matched = session.match(messages)
    assert (matched.kind, matched.parent_invocation) == ("branch", "i1")
    assert matched.reason == "the template changes what stands before the answer of i1"
    assert matched.prompt_ids == fresh(session, messages)


def test_after_a_branch_the_conversation_is_continued(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, toys.FORGETFUL))
    messages = [user("x")]
    messages += [session.ask("i0", messages, "<think>\nhm\n</think>\n\nhe", END), user("y")]
    messages += [session.ask("i1", messages, "he", "llo", END), user("z")]
    assert session.continues(
        session.match(messages), "i1", "\n<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_rewrites_what_stands_before_makes_a_branch(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, toys.COUNTING))
    messages = [user("x")]
    messages += [session.ask("i0", messages, "hello", END), user("y")]
    matched = session.match(messages)
    assert (matched.kind, matched.prompt_ids) == ("branch", fresh(session, messages))
    assert matched.reason == "the template changes what stands before the answer of i0"


def test_other_tools_make_a_branch(session: Session) -> None:
    reply = session.ask("i0", [user("x")], "hello", END, tools=[tool("read")])
    matched = session.match([user("x"), reply, user("y")], [tool("read"), tool("write")])
    assert (matched.kind, matched.reason) == ("branch", "the tools have changed since i0")


def test_a_branch_that_shares_less_than_its_parent_did_is_continued(session: Session) -> None:
    messages = [user("x")]
    messages += [session.ask("i0", messages, "hello", END), user("y")]
    messages += [session.ask("i1", messages, "hello", END), user("z")]
    messages += [session.ask("i2", messages, "he", "llo", END, tools=[tool("read")]), user("z")]
    matched = session.match(messages, [tool("read")])
    suffix = "\n<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n"
    assert session.continues(matched, "i2", suffix)


def test_a_stop_token_that_swallows_space_is_continued_as_in_the_whole_text(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, tokenizer=toys.bpe(toys.HELLO, end_swallows_space=True)))
    messages = [user("x")]
    messages += [session.ask("i0", messages, "hello", END), user("y")]
    assert session.match(messages).prompt_ids == fresh(session, messages)


def test_thinking_that_the_prompt_opened_is_continued(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, toys.THINKING))
    reply = session.ask("i0", [user("x")], "hm\n</think>\n\n", "he", "llo", END)
    assert reply["content"] == "hello"
    matched = session.match([user("x"), reply, user("y")])
    assert session.continues(
        matched, "i0", "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_thinking_that_never_closed_is_not_continued_where_the_template_closes_it(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, toys.THINKING))
    reply = session.ask("i0", [user("x")], "hm")
    assert reply["content"] == ""
    matched = session.match([user("x"), reply, user("y")])
    assert (matched.kind, matched.reason) == ("branch", "the template adds text before the answer of i0")


def test_a_template_that_refuses_the_continuation_as_it_was_written_makes_a_branch(tmp_path: Path) -> None:
    refuses = "{% if '-answer' in (messages[1].content if messages[1] else '') %}{{ raise_exception('no') }}"
    session = Session(toy(tmp_path, refuses + "{% endif %}" + toys.CHATML))
    reply = session.ask("i0", [user("x")], "hello", END)
    matched = session.match([user("x"), reply, user("y")])
    assert (matched.kind, matched.reason) == (
        "branch",
        "the template refuses what follows i0: chat template: no",
    )


def test_a_template_that_leaves_the_answer_out_makes_a_branch(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, "{{ messages[0].content }}{{ messages | length }}"))
    reply = session.ask("i0", [user("x")], "hello", END)
    matched = session.match([user("x"), reply, user("y")])
    assert matched.reason == "the template does not show once and whole the answer of i0"


def test_two_agents_that_take_turns_stay_two_branches(session: Session) -> None:
    a, b = [user("A", "system"), user("x")], [user("B", "system"), user("x")]
    a += [session.ask("a1", a, "he", "llo", END), user("a2")]
    b += [session.ask("b1", b, "he", "llo", END), user("b2")]
    for messages, name in ((a, "a1"), (b, "b1")):
        suffix = f"\n<|im_start|>user\n{name[0]}2<|im_end|>\n<|im_start|>assistant\n"
        assert session.continues(session.match(messages), name, suffix)
    reply = session.ask("a2", a, "x", END)
    assert session.match([*b, assistant("y"), user("z")]).parent_invocation == "b1"
    assert session.match([*a, reply, user("z")]).parent_invocation == "a2"
    assert session.match(b).parent_invocation == "b1"


def test_three_leaves_share_their_beginning(session: Session) -> None:
    messages = [user("a long beginning that all share" * 10)]
    messages += [session.ask("i0", messages, "he", "llo", END)]
    stored = session.history.num_tokens
    for leaf in ("x", "y", "z"):
        matched = session.match([*messages, user(leaf)])
        suffix = f"\n<|im_start|>user\n{leaf}<|im_end|>\n<|im_start|>assistant\n"
        assert session.continues(matched, "i0", suffix)
        session.ask(leaf, [*messages, user(leaf)], "hello", END)
    new = sum(len(session.path(leaf)) - len(session.path("i0")) for leaf in "xyz")
    assert 0 < session.history.num_tokens - stored <= new


def test_siblings_are_told_apart_by_the_answer_that_came_back(session: Session) -> None:
    messages = [user("x" * 50)]
    prompt = session.match(messages)
    replies = [
        session.ask(f"i{i}", messages, *pieces, END, prompt=prompt)
        for i, pieces in enumerate([("he", "llo"), ("h", "e"), ("hello",)])
    ]
    for reply, name in zip(replies, ("i2", "i1", "i2"), strict=True):  # the same answer twice: the latest
        matched = session.match([*messages, reply, user("y")])
        assert matched.parent_invocation == name
        assert matched.prompt_ids[: len(session.path(name))] == session.path(name)
    assert session.history.num_tokens == len(prompt.prompt_ids) + sum(map(len, session.sampled.values()))


def test_a_retry_of_the_same_request_is_asked_the_same(session: Session) -> None:
    messages = [user("x")]
    messages += [session.ask("i0", messages, "he", END), user("y")]
    first = session.match(messages)
    session.ask("i1", messages, "hello", END)
    assert session.match(messages) == first
    session.ask("i2", messages, "hello", "hello", END)
    goes_on = session.match([*messages, assistant("hello"), user("z")])
    assert goes_on.parent_invocation == "i1"


def test_a_summary_in_place_of_the_history_is_a_new_root(session: Session) -> None:
    messages = [user("s", "system"), user("x")]
    messages += [session.ask("i0", messages, "hello", END), user("y")]
    session.ask("i1", messages, "hello", END)
    compacted = [user("s", "system"), user("what happened: hello")]
    matched = session.match(compacted)
    assert matched == Matched(prompt_ids=fresh(session, compacted), parent_invocation=None, kind="new")
    reply = session.ask("i2", compacted, "he", "llo", END)
    assert session.match([*compacted, reply, user("z")]).parent_invocation == "i2"
    assert session.match([*messages, assistant("hello"), user("z")]).parent_invocation == "i1"


def test_a_conversation_of_sixty_turns_stores_each_token_once(session: Session) -> None:
    messages = [user("s" * 100, "system")]
    for turn in range(60):
        messages.append(user(f"question {turn}"))
        matched = session.match(messages)
        assert matched.kind == ("extends" if turn else "new")
        messages.append(session.ask(f"i{turn}", messages, "he", "llo", END, prompt=matched))
    assert len(session.history) == 60
    assert session.history.num_tokens == len(session.path("i59"))


def test_branches_share_the_beginning_that_the_template_left_alone(tmp_path: Path) -> None:
    session = Session(toy(tmp_path, toys.FORGETFUL))
    messages = [user("x" * 500)]
    messages += [session.ask("i0", messages, "<think>\nhm\n</think>\n\nhe", END), user("y")]
    session.ask("i1", messages, "hello", END)
    stored = session.history.num_tokens
    assert stored < 600
    tool_loop = [*messages[:2], tool_result("c", "1")]
    session.ask("i2", tool_loop, "h", END)
    assert session.history.num_tokens - stored == len(session.path("i2")) - len(session.path("i0"))
    matched = session.match([*messages, assistant("hello"), user("z")])
    assert matched.prompt_ids[: len(session.path("i1"))] == session.path("i1")


def test_lone_surrogates_in_a_request_harm_nothing(session: Session) -> None:
    messages = [user("\ud800")]
    reply = session.ask("i0", messages, "hello", END)
    matched = session.match([*messages, reply, tool_result("c\udc00", "\udfff")])
    assert matched.kind == "extends"
    assert "\ufffd" in session.template.decode_all(matched.prompt_ids)


def test_sampled_bytes_that_are_no_text_are_continued(session: Session) -> None:
    broken = session.template.encode("é")[:1]
    prompt = session.match([user("x")])
    session.history.add(
        invocation_id="i0",
        messages=[user("x")],
        tools=[],
        prompt_ids=prompt.prompt_ids,
        sampled_ids=broken,
        reply=[assistant("\ufffd")],
    )
    matched = session.match([user("x"), assistant("\ufffd"), user("y")])
    assert matched.prompt_ids[: len(prompt.prompt_ids) + 1] == prompt.prompt_ids + broken


def test_an_answer_that_came_as_two_messages_is_continued(session: Session) -> None:
    sampled = session.template.encode("he") + session.template.encode("llo<|im_end|>")
    prompt = session.match([user("x")]).prompt_ids
    reply = [assistant("he"), assistant("llo")]
    session.history.add(
        invocation_id="i0",
        messages=[user("x")],
        tools=[],
        prompt_ids=prompt,
        sampled_ids=sampled,
        reply=reply,
    )
    messages = [user("x"), *reply, user("y")]
    session.prompts["i0"], session.sampled["i0"] = prompt, sampled
    suffix = "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
    assert session.continues(session.match(messages), "i0", suffix)
    reply_1 = session.ask("i1", messages, "hello", END)
    assert session.match([*messages, reply_1, user("z")]).kind == "extends"


def test_a_turn_is_added_once_and_not_without_messages(session: Session) -> None:
    session.ask("i0", [user("x")], "hello", END)
    with pytest.raises(ValueError, match="turn i0 is in the history already"):
        session.ask("i0", [user("x")], "hello", END)
    with pytest.raises(ValueError, match="turn i1: expected messages and a reply"):
        session.history.add(
            invocation_id="i1", messages=[], tools=[], prompt_ids=(1,), sampled_ids=(1,), reply=[user("x")]
        )


def test_content_that_is_no_text_is_refused_with_its_place(session: Session) -> None:
    with pytest.raises(
        MessageError, match="message 1: expected text parts only, got one of type 'image_url'"
    ):
        session.match([user("x"), user([{"type": "image_url", "image_url": {}}])])


WORDS = st.text(alphabet="helo é\n<日", max_size=8)
TURNS = st.lists(st.tuples(WORDS, st.lists(WORDS, max_size=4), st.booleans()), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def append_only(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    """Templates that leave the past alone."""
    names = ("CHATML", "THINKING")
    return {name: toy(tmp_path_factory.mktemp(name), getattr(toys, name)) for name in names}


@settings(max_examples=60, deadline=None)
@given(turns=TURNS)
@pytest.mark.parametrize("template", ["CHATML", "THINKING"])
def test_prompts_read_like_the_rendering_and_begin_with_the_recorded_ids(
    append_only: dict[str, ChatTemplate], template: str, turns: list[tuple[str, list[str], bool]]
) -> None:
    session = Session(append_only[template])
    opening = "\n</think>\n\n" if template == "THINKING" else ""
    messages: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for turn, (asked, pieces, is_cut) in enumerate(turns):
        messages, shown = [*messages, user(asked)], [*shown, user(asked)]
        matched = session.match(messages)
        assert session.template.decode_all(matched.prompt_ids) == session.template.render(shown)
        if turn:
            known = session.path(f"i{turn - 1}")
            assert (matched.kind, matched.parent_invocation) == ("extends", f"i{turn - 1}")
            assert matched.prompt_ids[: len(known)] == known
        written = [opening, *pieces] if opening else pieces
        reply = session.ask(f"i{turn}", messages, *written, *([] if is_cut else [END]), prompt=matched)
        messages = [*messages, reply]
        begun = "<think>\n" if opening else ""
        shown = [*shown, assistant(begun + "".join(written))]
