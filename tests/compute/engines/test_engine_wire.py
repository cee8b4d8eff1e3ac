"""Request bodies are read by SGLang's rules; what this engine cannot do is refused, not ignored."""

from __future__ import annotations

import pytest

from megloom.compute.engines.protocol import FinishReason
from megloom.compute.engines.wire import BadRequest, Limits, format_completion, parse_generate

LIMITS = Limits(vocab_size=61, context_length=300, eos_token_ids=(9,))


def parse(**changes):
    return parse_generate({"input_ids": [1, 2]} | changes, LIMITS)


def test_defaults_are_those_of_sglang():
    body = parse()
    (request,) = body.requests
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (128, 1.0, 1.0, -1)
    assert request.stop_ids == {9}
    assert len(request.rid) == 32
    assert not body.is_batch and not body.return_logprob


def test_unknown_top_level_fields_and_neutral_parameters_are_accepted():
    parse(session_id="x", sampling_params={"n": 1, "min_p": 0.0, "stop": [], "repetition_penalty": 1.0})


def test_ignore_eos_ignores_all_stop_ids_as_sglang_does():
    (request,) = parse(sampling_params={"ignore_eos": True, "stop_token_ids": [5]}).requests
    assert request.stop_ids == frozenset()
    (request,) = parse(sampling_params={"stop_token_ids": [5]}).requests
    assert request.stop_ids == {5, 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": "text"}, "input_ids"),
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [1, "2"]}, "integers"),
        ({"input_ids": [1, True]}, "integers"),
        ({"input_ids": [1, 2.0]}, "integers"),
        ({"text": "hello"}, "text"),
        ({"input_ids": [[1], [2]], "stream": True}, "stream takes one input"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"top_logprobs_num": 3}, "top_logprobs_num"),
        ({"sampling_params": [1]}, "sampling_params"),
        ({"sampling_params": {"n": 2}}, "n = 2"),
        ({"sampling_params": {"min_p": 0.1}}, "min_p"),
        ({"sampling_params": {"stop": ["\n"]}}, "stop"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": "7"}}, "max_new_tokens"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature"),
        ({"sampling_params": {"temperature": True}}, "temperature"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"stop_token_ids": [61]}}, "stop_token_ids"),
        ({"sampling_params": {"sampling_seed": 1.5}}, "sampling_seed"),
        ({"rid": ""}, "rid"),
        ({"rid": 3}, "rid"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "Duplicate request IDs"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params has 1 entries"),
    ],
)
def test_body_that_cannot_be_honoured_is_refused(changes, message):
    with pytest.raises(BadRequest, match=message):
        parse(**changes)


@pytest.mark.parametrize("body", [None, [], 3, "x"])
def test_body_must_be_an_object(body):
    with pytest.raises(BadRequest, match="object"):
        parse_generate(body, LIMITS)


def test_answer_of_a_request_that_was_aborted_before_its_first_token_is_empty(make_live):
    aborted = make_live(1, [1, 2])
    aborted.finish_reason = FinishReason.ABORT
    answer = format_completion(aborted, version=5, return_logprob=True)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["weight_versions"] == []
    assert answer["meta_info"]["weight_version"] == "5"
