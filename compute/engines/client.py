"""`HttpEngine`: the `Engine` protocol over SGLang's native HTTP API.

Works alike against real SGLang and the local torch engine. Promises: ids are checked against the vocabulary
before they are sent (SGLang does not check, and dies); `/generate` is never retried, since a retry is a
second sample; ids, logprobs and counts of an answer agree or the answer is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from megloom.compute.engines.protocol import (
    Completion,
    EngineInfo,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    GenerateRequest,
    PauseMode,
    VersionSpan,
)

_CONNECT_S = 10.0
"""A live engine accepts at once; its event loop may be in a long prefill, but the kernel answers."""


def error_message(body: bytes) -> str:
    """Returns the message of any of SGLang's error bodies: `error.message`, `error` or `message`."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:500]
    if isinstance(parsed, dict):
        error = parsed.get("error")
        found = error.get("message") if isinstance(error, dict) else error
        found = parsed.get("message") if found is None else found
        if found is not None:
            return str(found)
    return str(parsed)[:500]


def check_request(request: GenerateRequest, vocab_size: int, context_length: int) -> None:
    """Checks what the engine would refuse, or would not survive.

    Raises: EngineRefused.
    """
    ids, rid = request.token_ids, request.rid
    if not ids:
        raise EngineRefused(f"rid={rid}: empty prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise EngineRefused(f"rid={rid}: token id {wrong} is outside the vocabulary of {vocab_size}")
    if request.max_tokens < 1 or len(ids) + request.max_tokens > context_length:
        raise EngineRefused(
            f"rid={rid}: {len(ids)} prompt tokens and max_tokens={request.max_tokens} do not fit a context "
            f"of {context_length}, or ask for nothing"
        )
    if request.training and (request.top_p < 1 or request.top_k != -1):
        raise EngineRefused(
            f"rid={rid}: truncated sampling is refused for training, got top_p={request.top_p} "
            f"top_k={request.top_k}"
        )


def encode_request(request: GenerateRequest) -> bytes:
    """Returns the `/generate` body."""
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "sampling_seed": request.seed,
    }
    if request.stop_token_ids:
        sampling["stop_token_ids"] = request.stop_token_ids
    body = {
        "rid": request.rid,
        "input_ids": request.token_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "training": request.training,
    }
    return orjson.dumps(body)


def parse_version(text: Any, rid: str) -> int:
    """Returns a version off the wire, where it is a text, as a number."""
    try:
        return int(text)
    except (TypeError, ValueError):
        raise EngineProtocolError(f"rid={rid}: version {text!r} is not a whole number") from None


def _parse_spans(meta: Mapping[str, Any], num_tokens: int, rid: str) -> tuple[VersionSpan, ...]:
    raw: Sequence[Mapping[str, Any]] | None = meta.get("weight_versions")
    if raw is None:  # SGLang reports spans only after an update that named a version
        raw = [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    spans = tuple(
        VersionSpan(version=parse_version(span["version"], rid), start=span["start"], end=span["end"])
        for span in raw
        if span["end"] > span["start"]
    )
    end = 0
    for span in spans:
        if span.start != end:
            raise EngineProtocolError(f"rid={rid}: version spans leave a gap or overlap: {spans}")
        end = span.end
    if end != num_tokens:
        raise EngineProtocolError(f"rid={rid}: version spans cover {end} of {num_tokens} tokens: {spans}")
    return spans


def decode_completion(body: bytes, request: GenerateRequest) -> Completion:
    """Returns the completion in a 200 answer to `/generate`.

    Raises: EngineProtocolError if its parts disagree.
    """
    rid = request.rid
    try:
        parsed = orjson.loads(body)
        meta = parsed["meta_info"]
        token_ids = tuple(parsed["output_ids"])
        triples = meta["output_token_logprobs"] if token_ids else ()
        logprobs = tuple(triple[0] for triple in triples)
        logprob_ids = tuple(triple[1] for triple in triples)
        counted = meta["completion_tokens"]
        finish_reason = FinishReason(meta["finish_reason"]["type"])
        if meta["id"] != rid:
            raise EngineProtocolError(f"rid={rid}: got the answer to {meta['id']!r}")
        if not len(token_ids) == len(logprobs) == counted or logprob_ids != token_ids:
            raise EngineProtocolError(
                f"rid={rid}: {len(token_ids)} ids, {len(logprobs)} logprobs and completion_tokens={counted} "
                "should agree, and the logprobs should name the same ids"
            )
        return Completion(
            rid=rid,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            version_spans=_parse_spans(meta, len(token_ids), rid),
            cached_tokens=meta.get("cached_tokens", 0),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise EngineProtocolError(f"rid={rid}: cannot read the answer ({error!r}): {body[:300]!r}") from error


class HttpEngine:
    """One engine at `url`; create it inside a running event loop and `close` it there.

    `assumed` gives what real SGLang does not report: vocabulary size, context length, incarnation, and the
    policy, whose name it replaces by a path at an update. `generate` waits without bound, so that the
    caller sets the deadline; control calls end after `control_timeout_s`. `keep_alive_s` must be below the
    server's: 5 s for SGLang, 600 s for the local engine; a new connection costs as much as a short call.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        assumed: EngineInfo | None = None,
        control_timeout_s: float = 300.0,
        keep_alive_s: float = 3.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._assumed = assumed
        self._info: EngineInfo | None = None
        self._info_lock = asyncio.Lock()
        self._pause_mode: PauseMode | None = None
        self._control_timeout = aiohttp.ClientTimeout(total=control_timeout_s, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive_s),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        self._generate_url = f"{self._url}/generate"

    async def _call(
        self, method: str, url: str, what: str, body: bytes | None = None, *, control: bool = True
    ) -> bytes:
        """Returns the body of a 200 answer.

        Raises: EngineUnavailable, EngineRefused.
        """
        if self._session.closed:
            raise EngineUnavailable(f"{what}: the client of {self._url} is closed")
        options: dict[str, Any] = {"timeout": self._control_timeout} if control else {}
        try:
            async with self._session.request(method, url, data=body, **options) as response:
                status, answer = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"{what}: {self._url} cannot be reached: {error!r}") from error
        if status == 200:
            return answer
        kind = EngineUnavailable if status >= 500 else EngineRefused
        raise kind(f"{what}: {self._url} answered {status}, expected 200: {error_message(answer)}")

    async def _control(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._call("POST", self._url + path, path, json.dumps(body).encode())

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`."""
        limits = self._info or await self._first_info()
        check_request(request, limits.vocab_size, limits.context_length)
        answer = await self._call(
            "POST", self._generate_url, f"rid={request.rid}", encode_request(request), control=False
        )
        return decode_completion(answer, request)

    async def _first_info(self) -> EngineInfo:
        """Returns the limits that requests are checked against; asks once for all callers."""
        async with self._info_lock:
            return self._info or await self.info()

    async def abort(self, rid: str) -> None:
        """See `Engine.abort`."""
        await self._control("/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        await self._control("/pause_generation", {"mode": mode})
        self._pause_mode = mode

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._control("/continue_generation", {})
        self._pause_mode = None

    async def load_version(self, model_path: str, version: int, digest: str | None) -> None:
        """See `Engine.load_version`."""
        body: dict[str, Any] = {
            "model_path": model_path,
            "weight_version": str(version),
            # SGLang cannot flush under requests that are paused in place, and notices too late
            "flush_cache": self._pause_mode is not PauseMode.IN_PLACE,
        }
        if digest is not None:
            body["digest"] = digest
        answer = await self._control("/update_weights_from_disk", body)
        try:
            succeeded = json.loads(answer)["success"]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineProtocolError(f"version={version}: cannot read {answer[:300]!r}") from error
        if succeeded is not True:
            raise EngineRefused(f"version={version}: weights not updated: {error_message(answer)}")

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        answer = await self._call("GET", f"{self._url}/model_info", "/model_info")
        try:
            raw = json.loads(answer)
            assumed = self._assumed
            paused = raw["paused"] if "paused" in raw else not await self.ready()
            self._info = EngineInfo(
                policy=assumed.policy if assumed else raw["served_model_name"],
                version=parse_version(raw["weight_version"], "/model_info"),
                vocab_size=raw.get("vocab_size") or _need(assumed).vocab_size,
                context_length=raw.get("context_length") or _need(assumed).context_length,
                incarnation=raw.get("incarnation") or _need(assumed).incarnation,
                paused=paused,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise EngineProtocolError(f"/model_info: cannot read {answer[:300]!r}: {error!r}") from error
        return self._info

    async def ready(self) -> bool:
        """See `Engine.ready`."""
        try:
            await self._call("GET", f"{self._url}/ready", "/ready")
        except EngineUnavailable:
            return False
        return True

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._session.close()


def _need(assumed: EngineInfo | None) -> EngineInfo:
    if assumed is None:
        raise KeyError("the server does not report its limits and no `assumed` info was given")
    return assumed
