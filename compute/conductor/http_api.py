"""The service's HTTP routes. A bearer token guards all of them: the middleware denies before routing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from megloom.compute.cluster.http import TokenGuard
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.keeping import UnknownVersion
from megloom.compute.conductor.publisher import PublishAborted
from megloom.compute.conductor.sessions import SessionConflict, SessionTable, UnknownRun

MAX_WAIT_S = 60.0


class Api:
    """Handlers over the session table."""

    def __init__(self, table: SessionTable, epoch: int) -> None:
        self._table, self._epoch = table, epoch

    async def health(self, _: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "epoch": self._epoch, "pid": os.getpid()})

    async def start(self, request: Request) -> JSONResponse:
        config = SessionConfig.parse(await _body(request))
        session = await self._table.start(config)
        return JSONResponse(asdict(session.status()), status_code=201)

    async def sessions(self, _: Request) -> JSONResponse:
        return JSONResponse({"sessions": [asdict(session.status()) for session in self._table.all()]})

    async def status(self, request: Request) -> JSONResponse:
        return JSONResponse(asdict(self._table.get(request.path_params["run"]).status()))

    async def steps(self, request: Request) -> JSONResponse:
        """Long poll: answers when a step later than `after` is committed, or after `wait_s`."""
        session = self._table.get(request.path_params["run"])
        after = _number(request, "after", -1)
        session.renew_lease()
        await session.wait_for_change(
            after=int(after), timeout_s=min(MAX_WAIT_S, _number(request, "wait_s", 0.0))
        )
        steps = [report.to_json() for report in session.steps_after(int(after))]
        return JSONResponse({"status": asdict(session.status()), "steps": steps})

    async def cancel(self, request: Request) -> JSONResponse:
        session = await self._table.cancel(request.path_params["run"])
        return JSONResponse(asdict(session.status()))

    async def roll_back(self, request: Request) -> JSONResponse:
        """Answers when it is sealed, which is after the step in work."""
        body = await _body(request)
        policy, version = body.get("policy"), body.get("version")
        if not isinstance(policy, str) or type(version) is not int:
            raise ValueError(f'expected {{"policy": name, "version": number}}, got {body}')
        done = await self._table.roll_back(request.path_params["run"], policy, version)
        return JSONResponse(asdict(done))


def build_app(table: SessionTable, *, token: str, epoch: int) -> Starlette:
    """The application with every route behind the token."""
    api = Api(table, epoch)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/sessions", api.sessions),
            Route("/sessions", api.start, methods=["POST"]),
            Route("/sessions/{run}", api.status),
            Route("/sessions/{run}/steps", api.steps),
            Route("/sessions/{run}/cancel", api.cancel, methods=["POST"]),
            Route("/sessions/{run}/rollback", api.roll_back, methods=["POST"]),
        ],
        middleware=[Middleware(TokenGuard, token=token)],
        exception_handlers={
            ValueError: _answer(400),
            UnknownRun: _answer(404),
            UnknownVersion: _answer(404),
            FileNotFoundError: _answer(404),
            PublishAborted: _answer(503),
            SessionConflict: _answer(409),
        },
    )


def _answer(status: int) -> Any:
    async def handle(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=status)

    return handle


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object, got {type(body).__name__}")
    return body


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f"query parameter {name}: expected a number, got {text!r}") from None
