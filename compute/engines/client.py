"""`HttpEngine`: the `Engine` protocol over SGLang's native HTTP API.

Works alike against real SGLang and the local torch engine. Promises: ids are checked against the vocabulary
before they are sent (SGLang does not check, and dies); `/generate` is never retried, since a retry is a
second sample; ids, logprobs and counts of an answer agree or the answer is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson

from megloom.compute.engines.answers import (
    AnswerReader,
    Piece,
    decode_completion,
    error_message,
    parse_version,
    whole,
)
from megloom.compute.engines.protocol import (
    Completion,
    EngineError,
    EngineInfo,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    GenerateRequest,
    PauseMode,
)

_CONNECT_S = 10.0
"""A live engine accepts at once; its event loop may be in a long prefill, but the kernel answers."""


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


def encode_request(request: GenerateRequest, *, stream: bool = False) -> bytes:
    """Returns the `/generate` body. `incremental` is the local engine's: SGLang overlooks it."""
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "sampling_seed": request.seed,
    }
    if request.stop_token_ids:
        sampling["stop_token_ids"] = request.stop_token_ids
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.token_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "training": request.training,
    }
    if stream:
        body |= {"stream": True, "incremental": True}
    return orjson.dumps(body)


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
        self._url, self.token = url.rstrip("/"), token
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

    @property
    def url(self) -> str:
        """Where the engine listens."""
        return self._url

    @property
    def context_length(self) -> int | None:
        """How many tokens prompt and answer may have; None before the first `info`."""
        return self._info.context_length if self._info else None

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
        raise self._refusal(status, what, answer)

    def _refusal(self, status: int, what: str, answer: bytes) -> EngineError:
        kind = EngineUnavailable if status >= 500 else EngineRefused
        return kind(f"{what}: {self._url} answered {status}, expected 200: {error_message(answer)}")

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

    async def stream(
        self,
        *,
        rid: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int],
        incremental: bool,
    ) -> AsyncIterator[Piece]:
        """Yields pieces of an answer as they come, the last with its finish reason; one if not `incremental`.

        The tokens may be trained on. Leaving the iteration early ends the request at the engine.

        Raises: EngineRefused, EngineProtocolError, EngineUnavailable.
        """
        request = GenerateRequest(
            rid=rid,
            token_ids=tuple(prompt_ids),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
            training=True,
        )
        if not incremental:
            yield whole(await self.generate(request))
            return
        limits = self._info or await self._first_info()
        check_request(request, limits.vocab_size, limits.context_length)
        reader, body = AnswerReader(rid), encode_request(request, stream=True)
        if self._session.closed:
            raise EngineUnavailable(f"rid={rid}: the client of {self._url} is closed")
        try:
            async with self._session.post(self._generate_url, data=body) as response:
                if response.status != 200:
                    raise self._refusal(response.status, f"rid={rid}", await response.read())
                async for data in response.content.iter_any():
                    for piece in reader.read(data):
                        yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(f"rid={rid}: {self._url} cannot be reached: {error!r}") from error
        reader.end()

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
