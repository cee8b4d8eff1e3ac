"""Nobody calls without the token of the very episode that the path names, on any route."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from megloom.compute.gateway.app import GatewayApp
from megloom.compute.rollout.protocol import Endpoint
from tests.compute.gateway.fakes import FakeDesk, FakeEngine, RawClient, Served, pieces, says, served


def hello(chat: Any) -> Any:
    return says("hello", chat)


def all_routes() -> list[str]:
    gateway = GatewayApp(desk=FakeDesk(stop_token_ids=()), engines=lambda _: FakeEngine(lambda _: ()))
    return [route.path for route in gateway.router.routes]


def prefix(world: Served, endpoint: Endpoint) -> str:
    return endpoint.anthropic_url.removeprefix(world.base_url)


def test_the_routes_are_the_documented_ones() -> None:
    assert sorted(all_routes()) == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/responses",
        "/v1/tokens",
    ]


@pytest.mark.parametrize("route", [*all_routes(), "/v1/nothing", "/"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_every_route_is_closed_without_the_episodes_token(tmp_path: Path, route: str, method: str) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            mine, other = await world.admit("g000000-0000-m000"), await world.admit("g000000-0000-m001")
            client = await RawClient.connect(world.base_url)
            body = json.dumps({"model": "coder", "messages": [{"role": "user", "content": "x"}]}).encode()
            attempts: list[tuple[str, dict[str, str]]] = [
                (prefix(world, mine), {}),
                (prefix(world, mine), {"authorization": f"Bearer {other.token}"}),
                (prefix(world, mine), {"x-api-key": other.token}),
                (prefix(world, mine), {"authorization": "Bearer "}),
                (prefix(world, mine), {"authorization": f"Basic {mine.token}"}),
                (prefix(world, mine).replace("/r/r/", "/r/q/"), {"authorization": f"Bearer {mine.token}"}),
                (prefix(world, mine).replace("/a/0", "/a/1"), {"authorization": f"Bearer {mine.token}"}),
                ("/r/r/e/unknown/a/0", {"authorization": f"Bearer {mine.token}"}),
                ("", {"authorization": f"Bearer {mine.token}"}),
            ]
            for path, headers in attempts:
                status, _, answer = await client.ask(method, path + route, body, headers=headers)
                told = json.loads(answer)
                assert status == 401, (path, headers)
                assert told["error"]["type"] == "authentication_error"
                assert ("code" in told["error"]) != route.startswith("/v1/messages")  # each in its own form
            client.close()
            assert not world.desk.calls and not world.engine.asks

    asyncio.run(scenario())


def test_a_websocket_gets_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        gateway = GatewayApp(desk=FakeDesk(stop_token_ids=()), engines=lambda _: FakeEngine(lambda _: ()))
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("nothing is read")

        await gateway.app({"type": "websocket", "path": "/", "headers": []}, receive, send)
        assert sent == []

    asyncio.run(scenario())


def test_the_official_clients_raise_their_own_errors(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            endpoint = await world.admit()
            wrong = Endpoint(
                openai_url=endpoint.openai_url, anthropic_url=endpoint.anthropic_url, token="wrong"
            )
            messages: list[Any] = [{"role": "user", "content": "x"}]
            with pytest.raises(openai.AuthenticationError):
                await world.openai(wrong).chat.completions.create(model="coder", messages=messages)
            with pytest.raises(anthropic.AuthenticationError):
                await world.anthropic(wrong).messages.create(model="coder", messages=messages, max_tokens=9)

    asyncio.run(scenario())


def test_either_kind_of_token_header_opens_either_dialect(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            endpoint = await world.admit()
            client = await RawClient.connect(world.base_url)
            for headers in ({"x-api-key": endpoint.token}, {"authorization": f"bearer {endpoint.token}"}):
                path = prefix(world, endpoint) + "/v1/models"
                assert (await client.ask("GET", path, headers=headers))[0] == 200
            client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "route", "status", "names"),
    [
        ("POST", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/messages/nothing", 404, "not_found_error"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
    ],
)
def test_what_is_not_there_is_said_in_the_dialect_of_the_path(
    tmp_path: Path, method: str, route: str, status: int, names: str
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            endpoint = await world.admit()
            client = await RawClient.connect(world.base_url)
            bearer = {"authorization": f"Bearer {endpoint.token}"}
            path = prefix(world, endpoint) + route
            got, headers, answer = await client.ask(method, path, b"{}", headers=bearer)
            assert got == status and names in answer.decode()
            # HTTP wants it of a 405, and of nothing else.
            allowed = {"/v1/models": "GET"}.get(route, "POST") if status == 405 else None
            assert headers.get("allow") == allowed
            client.close()

    asyncio.run(scenario())


def test_names_with_spaces_and_percent_signs_still_lead_to_their_episode(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, lambda _: lambda ask: pieces((1,), "length")) as world:
            endpoint = await world.admit("e000001-a b%c", run="my run")
            models = world.openai(endpoint).models
            assert [model.id async for model in models.list()] == ["coder", "judge"]

    asyncio.run(scenario())


def test_a_client_that_says_at_once_that_it_sends_no_more_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            endpoint = await world.admit()
            client = await RawClient.connect(world.base_url)
            client.send("GET", prefix(world, endpoint) + "/v1/models")
            client.writer.write_eof()
            assert (await client.read_head())[0] == 401
            client.close()

    asyncio.run(scenario())
