"""Every way between nodes keeps one contract; each test runs against a folder, memory, HTTP and Mooncake."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from megloom.compute.state.digests import file_digest
from megloom.compute.state.errors import ConflictingState, TransportError
from megloom.compute.state.index import Entry
from megloom.compute.state.tiers import Tier
from megloom.compute.state.transports.folder import FolderTransport
from megloom.compute.state.transports.http import HttpTransport
from megloom.compute.state.transports.http_server import serving
from megloom.compute.state.transports.mooncake import (
    PIECE_BYTES,
    MooncakeSettings,
    MooncakeTransport,
    load_library,
)
from megloom.compute.state.transports.protocol import Transport
from megloom.compute.store.offload import InlineOffload, ThreadOffload
from tests.compute.state.node_store import a_store, key

LARGE = {Tier.TMPFS: None, Tier.DISK: None}
Opener = Callable[[Path], AbstractAsyncContextManager[Transport]]


@pytest.fixture(scope="module")
def mooncake_master() -> Iterator[str]:
    """The address of a running master, or a skip that says what is missing."""
    try:
        load_library()
    except TransportError as error:
        pytest.skip(str(error))
    program = shutil.which("mooncake_master") or str(Path(sys.executable).with_name("mooncake_master"))
    if not Path(program).exists():
        pytest.skip("mooncake_master is not on the PATH")
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as metrics:
        ports = (free.getsockname()[1], metrics.getsockname()[1])
    arguments = [program, f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
    master = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(_until_open(ports[0]))
        yield f"127.0.0.1:{ports[0]}"
    finally:
        master.kill()
        master.wait()


async def _until_open(port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            except OSError:
                await asyncio.sleep(0.05)


@pytest.fixture(params=["file", "memory", "http", "mooncake"])
def opener(request: pytest.FixtureRequest) -> Opener:
    """Opens a transport to an empty other side."""
    master = request.getfixturevalue("mooncake_master") if request.param == "mooncake" else ""

    @asynccontextmanager
    async def opened(folder: Path) -> AsyncIterator[Transport]:
        transport: Transport
        if request.param == "mooncake":
            settings = MooncakeSettings(master=master, segment_bytes=256 << 20)
            with ThreadOffload("mooncake") as offload:
                transport = MooncakeTransport(settings, offload)
                try:
                    yield transport
                finally:
                    await transport.close()
        elif request.param == "http":
            (folder / "other").mkdir()
            bulk = InlineOffload()
            async with (
                a_store(folder / "other", budgets=None) as store,
                serving(store, bulk, token="secret") as url,
            ):
                transport = HttpTransport(url, token="secret", offload=bulk)
                try:
                    yield transport
                finally:
                    await transport.close()
        else:
            root = str(folder / "share") if request.param == "file" else f"memory:/{folder}"
            yield FolderTransport(root, InlineOffload())

    return opened


def an_object(folder: Path, data: bytes, version: int = 0) -> tuple[Entry, Path]:
    path = folder / f"object{version}"
    path.write_bytes(data)
    # Mooncake outlives a test: names must not repeat in a session.
    wanted = key(version, run=folder.name.strip("-_.") or "r")
    return Entry(key=wanted, digest=file_digest(path), size_bytes=len(data)), path


@pytest.mark.parametrize("size", [0, 5, 900])
def test_what_is_pushed_is_described_and_fetched(tmp_path: Path, opener: Opener, size: int) -> None:
    async def main() -> None:
        entry, path = an_object(tmp_path, random.Random(size).randbytes(size))
        async with opener(tmp_path) as transport:
            assert await transport.describe(entry.key) is None
            await transport.push(entry, path)
            await transport.push(entry, path)
            assert await transport.describe(entry.key) == entry
            target = tmp_path / "fetched"
            await transport.fetch(entry, target)
            assert target.read_bytes() == path.read_bytes()

    asyncio.run(main())


def test_other_content_is_refused_with_both_digests_and_the_old_stays(tmp_path: Path, opener: Opener) -> None:
    async def main() -> None:
        entry, path = an_object(tmp_path, b"one")
        other = tmp_path / "two"
        other.write_bytes(b"two")
        changed = Entry(key=entry.key, digest=file_digest(other), size_bytes=3)
        async with opener(tmp_path) as transport:
            await transport.push(entry, path)
            with pytest.raises(ConflictingState) as refused:
                await transport.push(changed, other)
            assert entry.digest in str(refused.value) and changed.digest in str(refused.value)
            assert await transport.describe(entry.key) == entry

    asyncio.run(main())


def test_fetching_what_is_not_there_is_an_error_of_the_transport(tmp_path: Path, opener: Opener) -> None:
    async def main() -> None:
        entry, _ = an_object(tmp_path, b"never pushed", version=8)
        async with opener(tmp_path) as transport:
            with pytest.raises(TransportError, match="v000008"):
                await transport.fetch(entry, tmp_path / "fetched")
            await transport.drop(entry.key)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_dropped_object_is_gone(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        root = str(tmp_path / "share") if kind == "file" else f"memory:/{tmp_path}"
        transport = FolderTransport(root, InlineOffload())
        entry, path = an_object(tmp_path, b"data")
        await transport.push(entry, path)
        await transport.drop(entry.key)
        await transport.drop(entry.key)
        assert await transport.describe(entry.key) is None
        assert not [found for found in (tmp_path / "share").rglob("*") if found.is_file()]

    asyncio.run(main())


def test_a_share_that_refuses_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "share").write_text("not a folder")

    async def main() -> None:
        transport = FolderTransport(str(tmp_path / "share"), InlineOffload())
        entry, path = an_object(tmp_path, b"data")
        with pytest.raises(TransportError, match="share: cannot"):
            await transport.push(entry, path)

    asyncio.run(main())


def test_a_scheme_without_its_package_is_an_error_that_names_it() -> None:
    with pytest.raises(TransportError, match="nosuch://bucket"):
        FolderTransport("nosuch://bucket", InlineOffload())


def test_mooncake_moves_many_pieces_and_is_secured_on_disk_first(
    tmp_path: Path, mooncake_master: str
) -> None:
    async def main() -> None:
        data = random.Random(0).randbytes(2 * PIECE_BYTES + 17)
        wanted = key(1, run=tmp_path.name)
        with ThreadOffload("holder") as one, ThreadOffload("client") as two:
            holder = MooncakeTransport(MooncakeSettings(master=mooncake_master, segment_bytes=256 << 20), one)
            client = MooncakeTransport(MooncakeSettings(master=mooncake_master), two)
            for name in ("a", "b"):
                (tmp_path / name).mkdir()
            async with (
                a_store(tmp_path / "a", node="a", budgets=LARGE, peers={"cache": holder}) as a,
                a_store(tmp_path / "b", node="b", budgets=LARGE, peers={"cache": client}) as b,
            ):
                await a.put(wanted, data)
                await a.share(wanted, "cache")
                assert {place.tier for place in await a.where(wanted) if place.node == "a"} == {
                    "tmpfs",
                    "disk",
                }
                assert (await b.get(wanted)).read_bytes() == data
                await holder.drop(wanted)
                assert await client.describe(wanted) is None
                assert (await a.get(wanted)).read_bytes() == data, "a cache is never the only copy"

    asyncio.run(main())
