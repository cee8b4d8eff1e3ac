"""SGLang's JSON for `/generate`: request bodies in, response bodies out, with its rules and wording.

Owns every check that SGLang makes on a request, plus those that it lacks (ids outside the vocabulary,
truncated sampling for training). Unknown top-level fields are ignored and unknown sampling parameters are
refused, as there. `BadRequest` becomes a 400.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megloom.compute.engines.live_request import LiveRequest
from megloom.compute.engines.protocol import FinishReason

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's

_SUPPORTED = frozenset(
    {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "sampling_seed", "ignore_eos"}
)
# parameters of SGLang that this engine knows only as "not used"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "stop": (None, []),
    "stop_regex": (None, []),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None,),
    "custom_params": (None,),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True, False),
}
_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "text": (None,),
    "input_embeds": (None,),
    "logprob_start_len": (-1, None),
    "top_logprobs_num": (0, None),
    "token_ids_logprob": (None,),
    "return_hidden_states": (False, None),
    "return_sampling_mask": (False, None),
    "lora_path": (None,),
}


class BadRequest(ValueError):
    """The request breaks a rule; the message says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What requests are checked against."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateBody:
    """A parsed body: its requests, and whether the answer is a list, or events that hold only new tokens."""

    requests: list[LiveRequest]
    is_batch: bool
    return_logprob: bool
    is_incremental: bool = False


def _number(
    params: Mapping[str, Any], key: str, default: float, valid: Callable[[float], bool], rule: str
) -> float:
    value = params.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not valid(value):
        raise BadRequest(f"{key} must be {rule}, got {value!r}.")
    return value


def _whole(params: Mapping[str, Any], key: str, default: int, valid: Callable[[int], bool], rule: str) -> int:
    value = params.get(key)
    if value is None:
        return default
    if type(value) is not int or not valid(value):
        raise BadRequest(f"{key} must be {rule}, got {value!r}.")
    return value


def _check_ids(ids: Any, vocab_size: int, what: str) -> list[int]:
    if not isinstance(ids, list) or any(type(token_id) is not int for token_id in ids):
        raise BadRequest(f"{what} must be a list of integers.")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise BadRequest(f"{what} holds {wrong}, which is outside the vocabulary of {vocab_size} tokens.")
    return ids


def _check_lengths(num_input: int, num_new: int, context_length: int) -> None:
    if num_input == 0:
        raise BadRequest("input_ids must hold at least one token.")
    if num_input >= context_length:
        raise BadRequest(
            f"The input ({num_input} tokens) is longer than the model's context length "
            f"({context_length} tokens)."
        )
    if num_input + num_new > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
            f"You requested a total of {num_input + num_new} tokens: {num_input} tokens from the input and "
            f"{num_new} tokens for the completion."
        )


def _check_neutral(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for key in given.keys() & neutral.keys():
        if given[key] not in neutral[key]:
            raise BadRequest(f"{key} = {given[key]!r} is not supported by this engine.")


def _parse_request(ids: Any, rid: str, params: Any, *, training: bool, limits: Limits) -> LiveRequest:
    if not isinstance(params, dict):
        raise BadRequest(f"sampling_params must be an object, got {type(params).__name__}.")
    unknown = sorted(params.keys() - _SUPPORTED - _NEUTRAL.keys())
    if unknown:
        raise BadRequest(
            f"unknown field `{unknown[0]}`, expected one of {sorted(_SUPPORTED | _NEUTRAL.keys())}"
        )
    _check_neutral(params, _NEUTRAL)
    prompt_ids = _check_ids(ids, limits.vocab_size, "input_ids")
    max_tokens = _whole(params, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS, lambda v: v > 0, "at least 1")
    _check_lengths(len(prompt_ids), max_tokens, limits.context_length)
    top_p = _number(params, "top_p", 1.0, lambda v: 0 < v <= 1, "in (0, 1]")
    top_k = _whole(params, "top_k", -1, lambda v: v == -1 or v >= 1, "-1 (off) or at least 1")
    if training and (top_p < 1 or top_k != -1):
        raise BadRequest(f"top_p and top_k are refused for training requests, got {top_p=} {top_k=}.")
    stop_ids: frozenset[int] = frozenset()
    if not params.get("ignore_eos"):
        listed = _check_ids(params.get("stop_token_ids") or [], limits.vocab_size, "stop_token_ids")
        stop_ids = frozenset(listed).union(limits.eos_token_ids)
    return LiveRequest(
        rid=rid,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        temperature=_number(
            params, "temperature", 1.0, lambda v: v >= 0 and math.isfinite(v), "finite and not negative"
        ),
        top_p=top_p,
        top_k=top_k,
        seed=_whole(params, "sampling_seed", secrets.randbits(63), lambda v: True, "an integer"),
        stop_ids=stop_ids,
    )


def _spread(value: Any, count: int, what: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadRequest(f"{what} has {len(value)} entries for {count} inputs.")
    return value


def wants_stream(body: Any) -> bool:
    """Returns whether a `/generate` body asks for events; errors then are events too."""
    return isinstance(body, dict) and body.get("stream") is True


def parse_generate(body: Any, limits: Limits) -> GenerateBody:
    """Returns the requests of a `/generate` body.

    Raises: BadRequest.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be an object, got {type(body).__name__}.")
    _check_neutral(body, _NEUTRAL_FIELDS)
    ids = body.get("input_ids")
    if not isinstance(ids, list):
        raise BadRequest("input_ids must be a list: this engine takes token ids, no text.")
    is_batch = bool(ids) and isinstance(ids[0], list)
    if is_batch and wants_stream(body):
        raise BadRequest("stream takes one input, got a list of inputs.")
    inputs = ids if is_batch else [ids]
    params = _spread(body.get("sampling_params") or {}, len(inputs), "sampling_params")
    given_rid = body.get("rid")
    rids = [secrets.token_hex(16) for _ in inputs] if given_rid is None else given_rid
    rids = (
        rids
        if isinstance(rids, list)
        else [rids]
        if not is_batch
        else [f"{rids}_{i}" for i in range(len(inputs))]
    )
    if len(rids) != len(inputs) or not all(isinstance(rid, str) and rid for rid in rids):
        raise BadRequest(f"rid must be a text per input, got {given_rid!r} for {len(inputs)} inputs.")
    if len(set(rids)) < len(rids):
        raise BadRequest(f"Duplicate request IDs detected within the request: {rids}")
    training = body.get("training") is True
    return GenerateBody(
        requests=[
            _parse_request(input_ids, rid, param, training=training, limits=limits)
            for input_ids, rid, param in zip(inputs, rids, params, strict=True)
        ],
        is_batch=is_batch,
        return_logprob=bool(body.get("return_logprob")),
        is_incremental=body.get("incremental") is True,
    )


def _finish(request: LiveRequest) -> dict[str, Any] | None:
    if request.finish_reason is None:
        return None
    if request.finish_reason is FinishReason.STOP:
        return {"type": "stop", "matched": request.output_ids[-1]}
    if request.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(request.output_ids)}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def format_completion(
    request: LiveRequest, *, version: int, return_logprob: bool, since: int = 0
) -> dict[str, Any]:
    """Returns the response object of a request as far as it is; `version` is what the engine serves now.

    Only the ids and logprobs of the tokens from `since` on are listed; counts and spans are of all.
    """
    output_ids = request.output_ids[since:] if since else request.output_ids
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": _finish(request),
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(request.output_ids),
        "cached_tokens": request.cached_tokens,
        "num_retractions": request.num_retractions,
        "weight_version": str(version),
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in request.version_spans()
        ],
    }
    if return_logprob:
        pairs = zip(request.logprobs[since:], output_ids, strict=True)
        meta["output_token_logprobs"] = [(logprob, token_id, None) for logprob, token_id in pairs]
        meta["output_token_logprobs_length"] = len(request.logprobs)
        meta["input_token_logprobs"] = []
    return {"text": "", "output_ids": output_ids, "meta_info": meta}
