"""The service of a node's states: closed without the token, safe against names, resumable, verified."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from megloom.compute.state.digests import file_digest
from megloom.compute.state.errors import StateFull, TransportError
from megloom.compute.state.index import Entry
from megloom.compute.state.store import StateStore
from megloom.compute.state.tiers import Tier
from megloom.compute.state.transports.http import HttpTransport
from megloom.compute.state.transports.http_server import build_app, serving
from megloom.compute.store.offload import InlineOffload
from tests.compute.state.node_store import a_store, content, files_under, key

TOKEN = "secret"


@asynccontextmanager
async def a_service(folder: Path, **options: object) -> AsyncIterator[tuple[StateStore, str]]:
    async with (
        a_store(folder, **options) as store,  # type: ignore[arg-type]
        serving(store, InlineOffload(), token=TOKEN) as url,
    ):
        yield store, url


async def status_of(method: str, url: str, token: str | None = TOKEN, **options: object) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, url, **options) as response,  # type: ignore[arg-type]
    ):
        return response.status


@pytest.mark.parametrize("token", [None, "", "wrong", "sécret", "secre"])
def test_nothing_answers_without_the_token(tmp_path: Path, token: str | None) -> None:
    async def main() -> None:
        async with a_service(tmp_path) as (store, url):
            await store.put(key(), b"state")
            for method, path in (
                ("GET", f"/v1/entries/{key()}"),
                ("GET", f"/v1/objects/{key()}"),
                ("PUT", f"/v1/objects/{key(1)}?digest=x"),
                ("GET", "/no/such/route"),
                ("DELETE", f"/v1/objects/{key()}"),
            ):
                assert await status_of(method, url + path, token) == 401
            assert await status_of("GET", f"{url}/v1/objects/{key()}") == 200
            transport = HttpTransport(url, token=token or "x", offload=InlineOffload())
            with pytest.raises(TransportError, match="status 401"):
                await transport.describe(key())
            await transport.close()
            with pytest.raises(ValueError, match="empty token"):
                build_app(store, InlineOffload(), token="")

    asyncio.run(main())


@pytest.mark.parametrize(
    "name",
    [
        "../../../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "r/solver/trainer/..%2fv000000",
        "r/solver/trainer/v000000%00",
        "%2e%2e/solver/trainer/v000000",
        "r/solver/trainer/v000000/..",
        ".drafts/x",
        "index.sqlite",
    ],
)
def test_no_name_leads_out_of_the_store(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        async with a_service(tmp_path) as (store, url):
            await store.put(key(), b"state")
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))  # a client would tidy the path up
            writer.write(
                f"GET /v1/objects/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
            answer = await reader.read()
            writer.close()
            assert int(answer.split()[1]) in (400, 404), answer
            assert b"root:" not in answer and b"SQLite" not in answer

    asyncio.run(main())


def test_ranges_are_honoured_and_other_content_than_asked_for_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_service(tmp_path) as (store, url):
            entry = await store.put(key(), b"0123456789")
            headers = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=4-"}
            address = f"{url}/v1/objects/{key()}"
            async with aiohttp.ClientSession(headers=headers) as session:
                async with session.get(f"{address}?digest={entry.digest}") as response:
                    assert (response.status, await response.read()) == (206, b"456789")
                async with session.get(f"{address}?digest={'0' * 64}") as response:
                    assert response.status == 409 and entry.digest in await response.text()
            assert await status_of("GET", f"{url}/v1/objects/{key(7)}") == 404

    asyncio.run(main())


class BreakingProxy:
    """Forwards TCP to `port`, and cuts each of the first connections after so many bytes of the answer."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port, self._cuts = port, list(cuts)
        self.num_connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        left = self._cuts.pop(0) if self._cuts else 1 << 60
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            far_writer.write(await reader.readuntil(b"\r\n\r\n"))
            while left > 0 and (data := await far_reader.read(min(left, 1 << 16))):
                writer.write(data)
                await writer.drain()
                left -= len(data)
        finally:
            far_writer.close()
            writer.close()


@pytest.mark.parametrize(("cuts", "works"), [([300_000, 200_000, 250], True), ([0] * 20, False)])
def test_a_transfer_that_breaks_is_resumed_where_it_broke(
    tmp_path: Path, cuts: list[int], works: bool
) -> None:
    async def main() -> None:
        data = random.Random(1).randbytes(1_000_000)
        (tmp_path / "a").mkdir()
        async with a_service(tmp_path / "a", budgets={Tier.DISK: None}) as (store, url):
            entry = await store.put(key(), data)
            proxy = BreakingProxy(int(url.rpartition(":")[2]), cuts)
            server = await asyncio.start_server(proxy, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                transport = HttpTransport(
                    f"http://127.0.0.1:{port}", token=TOKEN, offload=InlineOffload(), pause_s=0
                )
                target = tmp_path / "fetched"
                try:
                    if works:
                        await transport.fetch(entry, target)
                        assert target.read_bytes() == data and proxy.num_connections == len(cuts) + 1
                    else:
                        with pytest.raises(TransportError, match=r"broke off at byte 0 of 1000000 4 times"):
                            await transport.fetch(entry, target)
                finally:
                    await transport.close()

    asyncio.run(main())


def test_an_upload_is_verified_and_a_broken_one_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        source = tmp_path / "source"
        source.write_bytes(b"uploaded")
        (tmp_path / "node").mkdir()
        async with a_service(tmp_path / "node", budgets={Tier.DISK: 100}) as (store, url):
            transport = HttpTransport(url, token=TOKEN, offload=InlineOffload())
            good = Entry(key=key(), digest=file_digest(source), size_bytes=8)
            await transport.push(good, source)
            assert await content(store, key()) == b"uploaded" and await store.entry(key()) == good
            bad = Entry(key=key(1), digest="0" * 64, size_bytes=8)
            with pytest.raises(TransportError, match="the body has digest"):
                await transport.push(bad, source)
            source.write_bytes(bytes(101))
            large = Entry(key=key(2), digest=file_digest(source), size_bytes=101)
            with pytest.raises(StateFull, match="tier disk: 101 bytes wanted"):
                await transport.push(large, source)
            await transport.close()
            assert await status_of("PUT", f"{url}/v1/objects/{key(3)}", data=b"x") == 400, "no digest given"
            await _break_an_upload(url)
            async with asyncio.timeout(10):
                while len(files_under(tmp_path / "node/disk")) > 1:  # noqa: ASYNC110 - the server has no event
                    await asyncio.sleep(0.01)
            assert await store.keys() == [key()] and (await store.held_bytes())[Tier.DISK] == 8

    asyncio.run(main())


async def _break_an_upload(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"PUT /v1/objects/{key(4)}?digest=x HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n"
        f"Authorization: Bearer {TOKEN}\r\n\r\nhalf".encode()
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
