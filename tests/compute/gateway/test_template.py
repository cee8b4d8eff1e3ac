"""The gateway's templates give what transformers gives, tools included, and know what follows an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megloom.compute.gateway.messages import plain_messages
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.rollout.chat import Chat, ChatError

from . import toys
from .toys import assistant, call, tool, tool_result, toy, user

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "plain": ([user("be brief", "system"), user("hello"), assistant("he"), user("go\n")], []),
    "tools": ([user("be brief", "system"), user("read é")], [tool("read"), tool("write")]),
    "tool calls": (
        [
            user("go"),
            assistant("so", call("c1", "read", '{"path": "<a>", "b": 1}'), call("c2", "read", "{}")),
            tool_result("c1", "1 & 2"),
            tool_result("c2", "2"),
        ],
        [tool("read")],
    ),
    "thinking": ([user("a"), assistant("<think>\nx\n</think>\n\ny"), user("b"), assistant("c")], []),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", ["CHATML", "FORGETFUL", "THINKING", "SPACED", "COUNTING"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_and_ids_equal_those_of_auto_tokenizer(
    tmp_path: Path, template: str, name: str, add_generation_prompt: bool
) -> None:
    ours = toy(tmp_path, getattr(toys, template))
    messages, tools = CONVERSATIONS[name]
    plain = plain_messages(messages)
    text = ours.render(plain, tools, add_generation_prompt)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    options = {"tools": tools or None, "add_generation_prompt": add_generation_prompt}
    assert text == theirs.apply_chat_template(plain, tokenize=False, **options)
    ids = theirs.apply_chat_template(plain, tokenize=True, return_dict=False, **options)
    assert list(ours.encode(text)) == ids
    assert ours.decode_all(ours.encode(text)) == text


def test_variables_reach_the_template(tmp_path: Path) -> None:
    written = toys.write(tmp_path, "{{ messages[0].content }}{% if deep %}<think>\n{% endif %}")
    assert ChatTemplate(Chat(written), {"deep": True}).render([user("a")]) == "a<think>\n"
    assert ChatTemplate(Chat(written)).render([user("a")]) == "a"


def test_a_prompt_that_opens_the_thinking_is_noticed(tmp_path: Path) -> None:
    assert toy(tmp_path, toys.THINKING).opens_reasoning
    assert not toy(tmp_path, toys.FORGETFUL).opens_reasoning
    assert not toy(tmp_path, "{{ raise_exception('two at least') }}").opens_reasoning


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].missing.field }}", "UndefinedError"),
    ],
)
def test_what_a_template_refuses_is_a_chat_error(tmp_path: Path, template: str, cause: str) -> None:
    with pytest.raises(ChatError, match=cause):
        toy(tmp_path, template).render([user("a")])


def test_the_marked_span_of_an_answer_and_the_date_render_as_for_transformers(tmp_path: Path) -> None:
    ours = toy(
        tmp_path,
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y-%m') }}",
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.render([user("a")]) == theirs.apply_chat_template([user("a")], tokenize=False)


@pytest.mark.parametrize("special_markers", [True, False])
def test_decoding_leaves_special_tokens_out_but_keeps_markers(tmp_path: Path, special_markers: bool) -> None:
    ours = toy(tmp_path, tokenizer=toys.bpe(toys.HELLO, special_markers=special_markers))
    ids = ours.encode("<think>hello</think><|endoftext|>x<|im_end|>")
    assert ours.decode(ids) == "<think>hello</think>x"
    assert ours.decode_all(ids) == "<think>hello</think><|endoftext|>x<|im_end|>"


def test_what_follows_an_answer_is_encoded_as_after_its_stop_token(tmp_path: Path) -> None:
    ours = toy(tmp_path, tokenizer=toys.bpe(toys.HELLO, end_swallows_space=True))
    whole = ours.encode("<|im_end|>\n\nhello")
    assert ours.encode_after_answer("\n\nhello") == whole[1:]
    assert ours.encode_after_answer("\n\nhello") != ours.encode("\n\nhello")


def test_a_lone_surrogate_is_encoded_as_the_replacement_character(tmp_path: Path) -> None:
    ours = toy(tmp_path)
    text = ours.render([user("a\ud800b")], [{**tool("x"), "note": "\udc00"}])
    assert ours.encode(text) == ours.encode(text.replace("\ud800", "\ufffd").replace("\udc00", "\ufffd"))
