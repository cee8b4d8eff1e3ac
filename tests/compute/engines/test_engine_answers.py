"""Streamed answers in any cut of their bytes, cumulative or incremental; refused where parts disagree."""

from __future__ import annotations

import json

import orjson
import pytest

from megloom.compute.engines.answers import AnswerReader, decode_completion
from megloom.compute.engines.protocol import EngineProtocolError, EngineRefused, EngineUnavailable

NO_NUMBERS = [None, "-0.5", True, [-0.5], float("nan"), float("inf")]

RID = "a" * 32
IDS = [5, 6, 7, 8, 9]


def event(total, *, since=0, ids=None, spans=None, finish=None, **changes):
    """The event after `total` tokens, with those from `since` on."""
    own = IDS[since:total] if ids is None else ids
    meta = {
        "id": RID,
        "completion_tokens": total,
        "output_token_logprobs": [[-0.1 * token_id, token_id, None] for token_id in own],
        "weight_version": "3",
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans] if spans else None,
        "finish_reason": {"type": finish} if finish else None,
    }
    return b"data: " + json.dumps({"output_ids": own, "meta_info": meta | changes}).encode() + b"\n\n"


def pieces(data, *, cut=None):
    reader = AnswerReader(RID)
    parts = [data] if cut is None else [data[i : i + cut] for i in range(0, len(data), cut)]
    found = [piece for part in parts for piece in reader.read(part)]
    reader.end()
    return found


DONE = b"data: [DONE]\n\n"
CUMULATIVE = event(2) + event(3) + event(5, finish="stop") + DONE
INCREMENTAL = event(2) + event(3, since=2) + event(5, since=3, finish="stop") + DONE


@pytest.mark.parametrize("data", [CUMULATIVE, INCREMENTAL, CUMULATIVE.replace(b"\n", b"\r\n")])
@pytest.mark.parametrize("cut", [None, 1, 7, 1000])
def test_any_kind_and_any_cut_gives_the_same_pieces(data, cut):
    found = pieces(data, cut=cut)
    assert [sampled.token_ids for sampled, _ in found] == [(5, 6), (7,), (8, 9)]
    assert [sampled.version_spans for sampled, _ in found] == [((3, 0, 2),), ((3, 2, 3),), ((3, 3, 5),)]
    assert [reason for _, reason in found] == [None, None, "stop"]
    assert [round(value, 3) for sampled, _ in found for value in sampled.logprobs] == [
        -0.5, -0.6, -0.7, -0.8, -0.9
    ]  # fmt: skip


def test_events_without_news_are_no_pieces_and_an_end_without_tokens_is_one():
    found = pieces(event(0) + event(2) + event(2) + event(2, finish="abort"))
    assert [(sampled.token_ids, reason) for sampled, reason in found] == [((5, 6), None), ((), "abort")]


def test_pieces_say_what_the_engine_says_of_the_cached_prompt():
    told, untold = event(2, cached_tokens=7), event(5, finish="stop")
    assert [sampled.num_cached_tokens for sampled, _ in pieces(told + untold)] == [7, None]


def test_a_new_version_cuts_the_spans_at_its_first_token():
    data = event(3, spans=[("3", 0, 3)]) + event(5, spans=[("3", 0, 4), ("4", 4, 5)], finish="length")
    assert [sampled.version_spans for sampled, _ in pieces(data)] == [((3, 0, 3),), ((3, 3, 4), (4, 4, 5))]


def test_versions_that_only_the_last_event_tells_are_those_served_until_then():
    data = event(2) + event(3, weight_version="4")
    last = event(5, spans=[("3", 0, 2), ("4", 2, 5)], finish="length")
    spans = [sampled.version_spans for sampled, _ in pieces(data + last)]
    assert spans == [((3, 0, 2),), ((4, 2, 3),), ((4, 3, 5),)]


def test_a_last_event_that_tells_other_versions_tells_them_for_the_whole_answer():
    data = event(2) + event(3, weight_version="4")
    last = event(5, spans=[("3", 0, 3), ("4", 3, 5)], finish="length")
    assert pieces(data + last)[-1][0].version_spans == ((3, 0, 3), (4, 3, 5))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (event(2) + event(3, ids=[7, 8]), "2 output_ids, expected all 3 or the 1 new"),
        (event(3) + event(2), "2 output_ids, expected all 2 or the -1 new"),
        (event(2, output_token_logprobs=[]), "0 output_token_logprobs"),
        (event(2, output_token_logprobs=[[-1, 5, None], [-1, 7, None]]), "other ids"),
        (event(2, id="another"), "answer to 'another'"),
        (event(2, weight_versions=[{"version": "3", "start": 0, "end": 1}]), "cover 1 of 2"),
        (event(2, spans=[("3", 0, 2)]) + event(3, spans=[("4", 0, 3)]), "were"),
        (event(2, finish="tired"), "tired"),
        (b"data: {}\n\n", "cannot read"),
        (b"data: nonsense\n\n", "cannot read"),
    ],
)
def test_an_event_whose_parts_disagree_is_refused(data, message):
    with pytest.raises(EngineProtocolError, match=message):
        pieces(data)


def answered(body, make_request, *, is_stream):
    """What a 200 answer with one event's body says."""
    if is_stream:
        return pieces(b"data: " + body + b"\n\n")
    return decode_completion(body, make_request(rid=RID))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("bad", NO_NUMBERS)
def test_a_logprob_that_is_no_number_is_refused(make_request, bad, is_stream):
    triples = [[-0.5, 5, None], [bad, 6, None]]
    read = json.loads(event(2, finish="stop").removeprefix(b"data: "))
    read["meta_info"]["output_token_logprobs"] = triples
    body = orjson.dumps(read)  # as engines write it: what is not finite becomes null
    with pytest.raises(EngineProtocolError, match="logprob of token 1 is .*, expected a finite number"):
        answered(body, make_request, is_stream=is_stream)
    triples[1][0] = -1  # a whole number is one
    assert answered(orjson.dumps(read), make_request, is_stream=is_stream)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("bad", [None, "6", True, 6.0])
def test_an_id_that_is_no_whole_number_is_refused(make_request, bad, is_stream):
    read = json.loads(event(2, finish="stop").removeprefix(b"data: "))
    read["output_ids"][1] = read["meta_info"]["output_token_logprobs"][1][1] = bad
    body = orjson.dumps(read)
    with pytest.raises(EngineProtocolError, match="token 1 is .*, expected an id"):
        answered(body, make_request, is_stream=is_stream)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("bad", ["7", 7.5, True])
def test_a_count_of_cached_tokens_that_is_none_is_refused(make_request, bad, is_stream):
    body = event(2, cached_tokens=bad, finish="stop").removeprefix(b"data: ")
    with pytest.raises(EngineProtocolError, match="cached_tokens is .*, expected a whole number"):
        answered(body, make_request, is_stream=is_stream)


@pytest.mark.parametrize(("code", "kind"), [(400, EngineRefused), (503, EngineUnavailable)])
def test_an_error_event_is_the_engines_refusal_or_its_end(code, kind):
    error = {"error": {"message": "too long", "code": code}}
    with pytest.raises(kind, match="too long"):
        pieces(b"data: " + json.dumps(error).encode() + b"\n\n")


def test_a_stream_that_breaks_off_says_how_far_it_came():
    with pytest.raises(EngineUnavailable, match="after 3 tokens"):
        pieces(event(2) + event(3))
