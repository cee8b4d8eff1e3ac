"""Nodes: each its own process and folders, states pulled over HTTP or a share, verified, pulled once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megloom.compute.state.digests import file_digest
from megloom.compute.state.errors import ConflictingState, NoValidCopy, TransportError
from megloom.compute.state.index import Entry
from megloom.compute.state.keys import Key
from megloom.compute.state.node import TOKEN_VARIABLE
from megloom.compute.state.path_choice import Place
from megloom.compute.state.tiers import Tier
from megloom.compute.state.transports.folder import FolderTransport
from megloom.compute.state.transports.http import HttpTransport
from megloom.compute.store.offload import InlineOffload, ThreadOffload
from tests.compute.state.node_store import a_store, content, files_under, key, tiers_of

TOKEN = "secret"


@contextmanager
def a_node(folder: Path, node: str) -> Iterator[str]:
    """The URL of a node in a process of its own."""
    config = {
        "node": node,
        "index": str(folder / "index.sqlite"),
        "tiers": [
            {"tier": tier, "root": str(folder / tier), "budget_bytes": 1 << 20} for tier in ("tmpfs", "disk")
        ],
    }
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "megloom.compute.state.node", json.dumps(config)],
        env={**os.environ, TOKEN_VARIABLE: TOKEN},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        line = process.stdout.readline()
        assert line, "the node did not start"
        try:
            yield json.loads(line)["url"]
        finally:
            process.stdin.close()  # ends it
    assert process.returncode == 0


def test_a_state_of_another_process_is_pulled_verified_and_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"a state of node b")
    entry = Entry(key=key(1), digest=file_digest(source), size_bytes=17)

    async def main(url: str) -> None:
        with ThreadOffload("bulk") as bulk:
            way = HttpTransport(url, token=TOKEN, offload=bulk)
            (tmp_path / "a").mkdir()
            async with a_store(tmp_path / "a", node="a", peers={"b": way}, bulk=bulk) as store:
                await way.push(entry, source)
                assert await store.where(key(1)) == [Place(node="b", tier=Tier.DISK)]
                plans = await store.plan(key(1), Place(node="a", tier="mapped"))
                assert [step.kind.name for step in plans[0].steps] == ["PULL", "MMAP"]
                path = await store.get(key(1))
                assert path.is_relative_to(tmp_path / "a/tmpfs") and path.read_bytes() == source.read_bytes()
                assert await store.entry(key(1)) == entry
                await store.put(key(2), b"a state of node a")
                await store.share(key(2), "b")
                assert await way.describe(key(2)) == await store.entry(key(2))
                with pytest.raises(FileNotFoundError, match="v000003"):
                    await store.get(key(3))

    with a_node(tmp_path / "b", "b") as url:
        asyncio.run(main(url))
    with a_node(tmp_path / "b", "b"):
        pass  # it starts again on what it had


def test_a_node_that_is_gone_is_said_so_and_what_is_here_is_served(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        way = HttpTransport(url, token=TOKEN, offload=InlineOffload())
        async with a_store(tmp_path, node="a", peers={"b": way}) as store:
            await store.put(key(1), b"here")
            assert await content(store, key(1)) == b"here"
            with pytest.raises(NoValidCopy, match="127.0.0.1"):
                await store.get(key(2))

    with a_node(tmp_path / "b", "b") as url:
        pass
    asyncio.run(main(url))


class FakeWay:
    """A `Transport` to one node: its objects in a dict, its fetches counted, each after `gate` is set."""

    name = "http"
    is_cache = False

    def __init__(self, objects: dict[Key, bytes], *, digest: str | None = None) -> None:
        self.objects, self._digest = objects, digest
        self.num_fetches = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fetching = asyncio.Event()

    async def describe(self, wanted: Key) -> Entry | None:
        data = self.objects.get(wanted)
        if data is None:
            return None
        digest = self._digest or Entry(key=wanted, digest=_digest_of(data), size_bytes=len(data)).digest
        return Entry(key=wanted, digest=digest, size_bytes=len(data))

    async def fetch(self, entry: Entry, path: Path) -> None:
        self.num_fetches += 1
        self.fetching.set()
        await self.gate.wait()
        if entry.key not in self.objects:
            raise TransportError("it went away")
        path.write_bytes(self.objects[entry.key])

    async def push(self, entry: Entry, path: Path) -> None:
        self.objects[entry.key] = path.read_bytes()

    async def drop(self, wanted: Key) -> None:
        self.objects.pop(wanted, None)

    async def close(self) -> None:
        pass


def _digest_of(data: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return file_digest(Path(file.name))


def test_many_gets_of_one_key_pull_once_and_one_that_gives_up_harms_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        way = FakeWay({key(): b"data"})
        way.gate.clear()
        async with a_store(tmp_path, peers={"b": way}) as store:
            gets = [asyncio.create_task(store.get(key())) for _ in range(5)]
            await way.fetching.wait()
            gets[0].cancel()
            await asyncio.sleep(0)
            way.gate.set()
            paths = await asyncio.gather(*gets[1:])
            assert way.num_fetches == 1 and {path.read_bytes() for path in paths} == {b"data"}
            assert gets[0].cancelled()
            assert (await store.held_bytes())[Tier.TMPFS] == 4 and len(files_under(tmp_path / "tmpfs")) == 1

    asyncio.run(main())


@pytest.mark.parametrize("same", [True, False])
def test_a_put_during_a_pull_leaves_one_whole_object(tmp_path: Path, same: bool) -> None:
    async def main() -> None:
        way = FakeWay({key(): b"pulled"})
        way.gate.clear()
        async with a_store(tmp_path, peers={"b": way}) as store:
            get = asyncio.create_task(store.get(key()))
            await way.fetching.wait()
            await store.put(key(), b"pulled" if same else b"put")
            way.gate.set()
            if same:
                assert (await get).read_bytes() == b"pulled"
            else:
                with pytest.raises(ConflictingState):
                    await get
            assert await content(store, key()) == (b"pulled" if same else b"put")
            assert len(files_under(tmp_path / "tmpfs")) == 1

    asyncio.run(main())


def test_a_copy_that_arrives_corrupt_is_dropped_and_another_node_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        data = b"right"
        liar, honest = FakeWay({key(): b"wrong"}, digest=_digest_of(data)), FakeWay({key(): data})
        async with a_store(tmp_path, peers={"b": liar, "c": honest}) as store:
            assert await content(store, key()) == data
            assert liar.num_fetches == 1 and "node b sent digest" in caplog.text
        only_liar = FakeWay({key(1): b"wrong"}, digest=_digest_of(data))
        async with a_store(tmp_path, peers={"b": only_liar}) as store:
            with pytest.raises(NoValidCopy, match="node b sent digest"):
                await store.get(key(1))
            assert await store.keys() == [key()]

    asyncio.run(main())


def test_nodes_that_disagree_are_an_error_with_both_digests(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(
            tmp_path, peers={"b": FakeWay({key(): b"1"}), "c": FakeWay({key(): b"2"})}
        ) as store:
            with pytest.raises(ConflictingState) as error:
                await store.get(key())
            assert _digest_of(b"1") in str(error.value) and _digest_of(b"2") in str(error.value)

    asyncio.run(main())


def test_a_lost_local_copy_is_pulled_again_but_only_with_the_known_content(tmp_path: Path) -> None:
    async def main() -> None:
        way = FakeWay({key(1): b"same", key(2): b"different"})
        async with a_store(tmp_path, peers={"b": way}) as store:
            for version in (1, 2):
                await store.put(key(version), b"same")
                (await store.get(key(version))).unlink()
            assert await content(store, key(1)) == b"same"
            with pytest.raises(NoValidCopy, match="node b has digest"):
                await store.get(key(2))

    asyncio.run(main())


def test_a_closing_store_ends_its_pulls(tmp_path: Path) -> None:
    async def main() -> None:
        way = FakeWay({key(): b"data"})
        way.gate.clear()
        async with a_store(tmp_path, peers={"b": way}) as store:
            get = asyncio.create_task(store.get(key()))
            await way.fetching.wait()
        with pytest.raises(asyncio.CancelledError):
            await get
        assert files_under(tmp_path / "tmpfs") == []

    asyncio.run(main())


def test_two_nodes_share_a_folder_and_the_url_below_their_tiers(tmp_path: Path) -> None:
    async def main() -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
        share = str(tmp_path / "share")
        budgets = {Tier.TMPFS: 10, Tier.DISK: 10, Tier.REMOTE: None}
        roots = {Tier.REMOTE: tmp_path / "bucket"}
        async with (
            a_store(
                tmp_path / "a",
                node="a",
                budgets=budgets,
                roots=roots,
                peers={"share": FolderTransport(share, InlineOffload())},
            ) as a,
            a_store(
                tmp_path / "b",
                node="b",
                budgets=budgets,
                roots=roots,
                peers={"share": FolderTransport(share, InlineOffload())},
            ) as b,
        ):
            await a.put(key(1), b"shared")
            await a.share(key(1), "share")
            assert await content(b, key(1)) == b"shared"
            for version in range(2, 6):
                await a.put(key(version), bytes([version]) * 8)
            assert await tiers_of(a, key(2)) == ["remote"]
            assert await content(b, key(2)) == bytes([2]) * 8, "found at the URL without asking node a"
            assert await content(a, key(2)) == bytes([2]) * 8

    asyncio.run(main())
