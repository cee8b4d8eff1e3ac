"""The engine's HTTP routes: a subset of SGLang's native API, with its status codes and error bodies.

Deny by default: a request without the bearer token gets 401 before routing, so a route added later is
guarded too. Routes are plain ASGI callables, since one call costs less than a decode step should.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megloom.compute.cluster.http import TokenGuard
from megloom.compute.engines.event_stream import EventStream, RefusedStream, cancel_on_disconnect
from megloom.compute.engines.protocol import PauseMode
from megloom.compute.engines.service import EngineService, EngineStopped
from megloom.compute.engines.wire import BadRequest, Limits, format_completion, parse_generate, wants_stream

_MAX_BODY_BYTES = 64 << 20  # a batch of the longest prompts stays far below

Handler = Callable[[Any], Awaitable[ASGIApp]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineIdentity:
    """What an engine says of itself that never changes."""

    policy: str
    incarnation: str
    model_type: str
    max_slots: int


class _Disconnected(Exception):
    """The client has gone; there is nobody to answer."""


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


async def _read_body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if size > _MAX_BODY_BYTES:
            raise BadRequest(f"the body is larger than {_MAX_BODY_BYTES} bytes.")
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _read_json(receive: Receive) -> Any:
    body = await _read_body(receive)
    try:
        return json.loads(body) if body else {}
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def _read_object(receive: Receive) -> dict[str, Any]:
    body = await _read_json(receive)
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be an object, got {type(body).__name__}.")
    return body


def _optional_text(body: dict[str, Any], key: str) -> str | None:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{key} must be a text, got {value!r}.")
    return value


class EngineApp:
    """The routes over one service; `app` is the guarded ASGI application."""

    def __init__(self, service: EngineService, limits: Limits, identity: EngineIdentity, token: str) -> None:
        self._service, self._limits, self._identity = service, limits, identity
        posts = {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._update_weights_from_disk,
            "/flush_cache": self._flush_cache,
        }
        gets = {
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/ready": self._ready,
            "/health": self._health,
            "/metrics": self._metrics,
        }
        routes = [Route(path, _Endpoint(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, _Endpoint(handler), methods=["GET"]) for path, handler in gets.items()]
        self.router = Router(routes=routes, redirect_slashes=False)
        self.app = TokenGuard(self.router, token)

    async def _generate(self, receive: Receive) -> ASGIApp:
        self._service.note_arrival()
        given = await _read_json(receive)
        if wants_stream(given):
            try:
                return EventStream(self._service, parse_generate(given, self._limits))
            except BadRequest as error:
                return RefusedStream(str(error))
        body = parse_generate(given, self._limits)
        generating = asyncio.current_task()
        assert generating is not None
        watcher = asyncio.ensure_future(cancel_on_disconnect(receive, generating))
        try:
            finished = await self._service.generate(body.requests)
        except asyncio.CancelledError:
            if watcher.done() and not watcher.cancelled():
                generating.uncancel()
                raise _Disconnected from None
            raise
        finally:
            watcher.cancel()
        results = [
            format_completion(request, version=self._service.version, return_logprob=body.return_logprob)
            for request in finished
        ]
        if not all(math.isfinite(sum(request.logprobs)) for request in finished):  # JSON has no NaN
            return _error(500, f"non-finite logprobs for {[request.rid for request in finished]}")
        # orjson: the answers' thousands of numbers cost more than the rest of a short call.
        answer = orjson.dumps(results if body.is_batch else results[0])
        return Response(answer, media_type="application/json")

    async def _abort_request(self, receive: Receive) -> Response:
        body = await _read_object(receive)
        if body.get("abort_all") is True:
            self._service.abort_all()
        else:
            self._service.abort(_optional_text(body, "rid") or "")
        return Response()

    async def _pause_generation(self, receive: Receive) -> Response:
        given = (await _read_object(receive)).get("mode", PauseMode.ABORT)
        if given not in list(PauseMode):
            raise BadRequest(f"mode must be one of {[mode.value for mode in PauseMode]}, got {given!r}.")
        self._service.pause(PauseMode(given))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, receive: Receive) -> Response:
        await _read_object(receive)
        await self._service.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights_from_disk(self, receive: Receive) -> Response:
        body = await _read_object(receive)
        model_path = _optional_text(body, "model_path")
        version = _optional_text(body, "weight_version")
        if not model_path:
            raise BadRequest("model_path is required.")
        if version is not None and not version.isdecimal():
            raise BadRequest(f"weight_version must be a whole number as a text, got {version!r}.")
        try:
            num_paused = await self._service.update_weights(
                model_path,
                None if version is None else int(version),
                digest=_optional_text(body, "digest"),
                flush_cache=body.get("flush_cache", True) is not False,
                abort_all=body.get("abort_all_requests") is True,
            )
        except (ValueError, OSError) as error:
            message = f"weights not updated: {error}"
            return JSONResponse(
                {"success": False, "message": message, "num_paused_requests": 0}, status_code=400
            )
        return JSONResponse(
            {
                "success": True,
                "message": "Succeeded to update model weights.",
                "num_paused_requests": num_paused,
            }
        )

    async def _flush_cache(self, receive: Receive) -> Response:
        await _read_body(receive)
        if self._service.flush_cache():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed.\n", status_code=400)

    async def _model_info(self, receive: Receive) -> Response:
        return JSONResponse(
            {
                "model_path": self._service.model_path,
                "served_model_name": self._identity.policy,
                "weight_version": str(self._service.version),
                "model_type": self._identity.model_type,
                "is_generation": True,
                "vocab_size": self._limits.vocab_size,
                "context_length": self._limits.context_length,
                "incarnation": self._identity.incarnation,
                "paused": self._service.paused is not None,
            }
        )

    async def _server_info(self, receive: Receive) -> Response:
        return JSONResponse(
            {
                "version": "megloom",
                "served_model_name": self._identity.policy,
                "context_length": self._limits.context_length,
                "max_running_requests": self._identity.max_slots,
                "skip_tokenizer_init": True,
            }
        )

    async def _ready(self, receive: Receive) -> Response:
        return Response(status_code=200 if self._service.ready else 503)

    async def _health(self, receive: Receive) -> Response:
        return Response(status_code=200)

    async def _metrics(self, receive: Receive) -> Response:
        service = self._service
        gauges = {
            "num_running_reqs": ("gauge", service.num_running),
            "num_queue_reqs": ("gauge", service.num_queued),
            "gen_throughput": ("gauge", round(service.tokens_per_s, 3)),
            "generation_tokens_total": ("counter", service.num_sampled),
        }
        lines = []
        for name, (kind, value) in gauges.items():
            lines.append(f"# TYPE sglang:{name} {kind}")
            lines.append(f'sglang:{name}{{model_name="{self._identity.policy}"}} {value}')
        return PlainTextResponse("\n".join(lines) + "\n")


class _Endpoint:
    """One route: calls the handler, turns its errors into SGLang's status codes."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIApp
        try:
            response = await self._handler(receive)
        except BadRequest as error:
            response = _error(400, str(error))
        except EngineStopped as error:
            response = _error(503, str(error))
        except _Disconnected:
            return
        await response(scope, receive, send)
