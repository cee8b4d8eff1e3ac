"""A growing answer: tokens joined over engines, texts cut and parsed, the same in any cut into pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.gateway.answers import GrowingAnswer
from megloom.compute.gateway.protocol import Sampled
from megloom.compute.gateway.tool_calls import AnswerParser, join_deltas
from tests.compute.gateway.toys import toy

TEXT = (
    '<think>so 🦜</think>\n\nI look.\n<tool_call>\n{"name": "read", "arguments": {"path": "é"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return toy(tmp_path_factory.mktemp("chat"))


def growing(chat: Any, *, stops: tuple[str, ...] = (), max_tokens: int = 1000) -> GrowingAnswer:
    return GrowingAnswer(
        chat,
        stops=stops,
        stop_token_ids=chat.stop_ids,
        max_tokens=max_tokens,
        parser=AnswerParser("g000000-0000-m000-a0-i000"),
    )


def piece(ids: tuple[int, ...], first: int, *, version: int = 1, at: int = 0) -> Sampled:
    """`first` counts within the engine's request, `at` within the answer, for distinct log-probabilities."""
    return Sampled(
        token_ids=ids,
        logprobs=tuple(-float(at + first + position) for position in range(len(ids))),
        version_spans=((version, first, first + len(ids)),) if ids else (),
    )


@settings(deadline=None)
@given(data=st.data())
def test_any_cut_over_any_engines_gives_the_same_answer(chat: Any, data: st.DataObject) -> None:
    ids = (*chat.encode(TEXT), chat.stop_ids[0])
    cuts = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=8).map(sorted))
    restarts = set(data.draw(st.lists(st.sampled_from(cuts), max_size=2))) if cuts else set()
    answer, begun, told = growing(chat), 0, []
    version = 1
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        if start in restarts and start != begun:
            begun, version = start, version + 1
            answer.begin_request()
        answer.take(piece(ids[start:end], start - begun, version=version, at=begun))
        told += answer.deltas()
    told += answer.finish()
    reply = answer.reply("g000000-0000-m000-a0-i000", (1,), "stop")
    assert reply.token_ids == ids and answer.unusable is None
    assert reply.logprobs == tuple(-float(at) for at in range(len(ids)))
    assert (reply.text, reply.reasoning, reply.finish_reason) == ("I look.", "so 🦜", "tool_calls")
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("read", '{"path": "é"}')]
    streamed = join_deltas(told)
    assert (streamed.text, streamed.reasoning, streamed.tool_calls) == (
        reply.text,
        reply.reasoning,
        reply.tool_calls,
    )
    assert tuple(token for delta in told for token in delta.token_ids) == ids
    assert tuple(value for delta in told for value in delta.logprobs) == reply.logprobs
    assert reply.version_spans[-1][2] == len(ids) and len(reply.version_spans) == version


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_text_keeps_the_tokens_up_to_its_last_in_any_cut(chat: Any, size: int) -> None:
    ids = chat.encode("abc STOP def STOP")
    answer = growing(chat, stops=("STOP",))
    for start in range(0, len(ids), size):
        answer.take(piece(ids[start : start + size], start))
        if answer.stop_text:
            break
    answer.finish()
    reply = answer.reply("i", (1,), "stop")
    assert (reply.text.rstrip(), reply.stop_text) == ("abc", "STOP")
    assert chat.decode(reply.token_ids) == "abc STOP"
    assert reply.version_spans == ((1, 0, len(reply.token_ids)),)
    assert len(reply.logprobs) == len(reply.token_ids) and answer.unusable is None


def test_what_may_begin_a_stop_text_is_text_after_all_when_the_answer_ends(chat: Any) -> None:
    answer = growing(chat, stops=("STOP",))
    answer.take(piece(chat.encode("abc STO"), 0))
    answer.finish()
    assert answer.reply("i", (1,), "length").text == "abc STO"
    assert answer.stop_text is None


def test_a_stop_text_in_a_character_that_never_became_whole_is_found_at_the_end(chat: Any) -> None:
    ids = chat.encode("é")
    answer = growing(chat, stops=("\ufffd",))
    answer.take(piece(ids[:1], 0))
    answer.finish()
    reply = answer.reply("i", (1,), "length")
    assert (reply.text, reply.stop_text, reply.token_ids) == ("", "\ufffd", ids[:1])


def test_the_tokens_themselves_tell_that_an_answer_is_complete(chat: Any) -> None:
    stop = chat.stop_ids[0]
    answer = growing(chat, max_tokens=3)
    assert answer.is_complete() is None
    answer.take(piece((5, 6), 0))
    assert answer.is_complete() is None and answer.num_left == 1
    answer.take(piece((7,), 2))
    assert answer.is_complete() == "length"
    stopped = growing(chat, max_tokens=3)
    stopped.take(piece((5, stop), 0))
    assert stopped.is_complete() == "stop"


def test_spans_of_one_version_join_over_pieces_and_engines(chat: Any) -> None:
    answer = growing(chat)
    answer.take(piece((5, 6), 0, version=4))
    answer.take(piece((7,), 2, version=4))
    answer.begin_request()
    answer.take(piece((8,), 0, version=4, at=3))
    answer.take(piece((9,), 1, version=5, at=3))
    assert answer.sampled.version_spans == ((4, 0, 4), (5, 4, 5))


def test_spans_that_reach_back_replace_those_of_earlier_pieces_of_the_same_request(chat: Any) -> None:
    answer = growing(chat)
    answer.take(piece((7, 8), 0, version=1))
    answer.begin_request()
    answer.take(piece((9, 10), 0, version=1))
    told_anew = Sampled(token_ids=(11,), logprobs=(-1.0,), version_spans=((1, 0, 1), (2, 1, 3)))
    answer.take(told_anew)
    answer.finish()
    assert answer.sampled.version_spans == ((1, 0, 3), (2, 3, 5))
    assert answer.unusable is None
