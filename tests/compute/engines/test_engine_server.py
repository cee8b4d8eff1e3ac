"""The process around the engine: address file, token on every route, ends cleanly, says what is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import aiohttp
import pytest

from megloom.compute.engines.client import HttpEngine
from megloom.compute.engines.protocol import FinishReason
from megloom.compute.engines.server import TOKEN_VARIABLE, EngineArgs, build_app, parse_args


def make_args(model_dir, **overrides):
    knobs = {"policy": "p", "version": 0, "token": "secret", "address_file": "unused", "incarnation": "i"}
    return EngineArgs(model_dir=model_dir, **knobs | overrides)


def test_no_route_answers_without_the_token(model_dir):
    _, engine_app = build_app(make_args(model_dir))
    routes = engine_app.router.routes
    assert len(routes) == 11

    async def walk():
        async def receive():
            return {"type": "http.request", "body": b"{}"}

        for route in routes:
            for headers in ([], [(b"authorization", b"Bearer secre")], [(b"authorization", b"secret")]):
                statuses = []

                async def send(message, statuses=statuses):
                    if message["type"] == "http.response.start":
                        statuses.append(message["status"])

                for method in route.methods:
                    scope = {"type": "http", "method": method, "path": route.path, "headers": headers}
                    await engine_app.app(scope, receive, send)
                assert set(statuses) == {401}, route.path

    asyncio.run(walk())


def test_token_is_required_and_never_printed(model_dir):
    assert "secret" not in repr(make_args(model_dir))
    with pytest.raises(ValueError, match="token"):
        build_app(make_args(model_dir, token=""))


def test_context_longer_than_the_model_is_refused(model_dir):
    with pytest.raises(ValueError, match="context_length 5000"):
        build_app(make_args(model_dir, context_length=5000))


def test_sigterm_answers_live_requests_and_exits_with_zero(start_engine, model_dir, make_request):
    url, process = start_engine(model_dir)

    async def scenario():
        engine = HttpEngine(url, "secret")
        live = asyncio.create_task(engine.generate(make_request(max_tokens=3000)))
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
            text = ""
            while "sglang:num_running_reqs{" not in text or 'reqs{model_name="solver"} 1' not in text:
                async with session.get(f"{url}/metrics") as response:
                    text = await response.text()
        os.kill(process.pid, signal.SIGTERM)
        assert (await live).finish_reason is FinishReason.ABORT
        await engine.close()

    asyncio.run(scenario())
    process.join(timeout=10)
    assert process.exitcode == 0


def test_connection_may_rest_and_be_used_again(start_engine, model_dir):
    url, _ = start_engine(model_dir)

    async def scenario():
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
            for path, status in (("/ready", 200), ("/nowhere", 404), ("/generate", 405), ("/ready", 200)):
                async with session.get(url + path) as response:
                    assert response.status == status
            async with session.post(f"{url}/generate", data=b"{oops") as response:
                assert response.status == 400
                assert "not JSON" in (await response.json())["error"]["message"]

    asyncio.run(scenario())


def test_command_line_takes_the_token_from_the_environment_only(monkeypatch, capsys):
    given = ["--model-dir", "m", "--policy", "p", "--version", "5", "--incarnation", "i"]
    given += ["--address-file", "a", "--max-slots", "7"]
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        parse_args(given)
    assert TOKEN_VARIABLE in capsys.readouterr().err
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    args = parse_args(given)
    assert (args.token, args.version, args.max_slots, args.context_length) == ("secret", 5, 7, None)


@pytest.mark.slow  # imports torch in a new interpreter
def test_command_line_starts_an_engine(model_dir, tmp_path):
    address_file = tmp_path / "address.json"
    command = [sys.executable, "-m", "megloom.compute.engines.server", "--model-dir", model_dir]
    command += ["--policy", "p", "--version", "5", "--incarnation", "i", "--address-file", str(address_file)]
    process = subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: "secret"})
    try:
        while not address_file.exists():
            assert process.poll() is None
        address = json.loads(address_file.read_text())
        assert address["pid"] == process.pid
        assert address["host"] == "127.0.0.1"
    finally:
        process.terminate()
        assert process.wait(timeout=10) == 0
