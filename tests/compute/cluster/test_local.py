"""The local cluster: processes start fast, their ends are reported, and none is ever left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megloom.compute.cluster.local import LocalCluster
from megloom.compute.cluster.protocol import ClusterError, ProcessSpec
from megloom.compute.conductor.client import is_alive

ENTRIES = "tests.compute.cluster.children"


def with_cluster(tmp_path: Path, body: Callable[[LocalCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = LocalCluster(tmp_path / "logs", preload=(ENTRIES,))
        try:
            await body(cluster)
        finally:
            await cluster.close()

    asyncio.run(main())


def spec(name: str, entry: str, **args: object) -> ProcessSpec:
    return ProcessSpec(name=name, entry=f"{ENTRIES}:{entry}", args=args, env={"COLOUR": "blue"})


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another process has no event for us
            await asyncio.sleep(0.01)


async def started(cluster: LocalCluster, path: Path, name: str = "s", **args: object) -> tuple[int, int]:
    """A sleeping process and its own child, by pid."""
    pid = await cluster.start(spec(name, "sleep", path=str(path), **args))
    await eventually(lambda: path.exists() and bool(path.read_text()))
    return pid, int(path.read_text())


def test_a_process_runs_its_entry_with_its_environment_and_its_end_is_reported(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster) -> None:
        exits = cluster.watch("")
        pid = await cluster.start(spec("one", "write_and_end", path=str(tmp_path / "out")))
        ended = await exits.get()
        assert (ended.name, ended.pid, ended.code) == ("one", pid, 0)
        assert (tmp_path / "out").read_text() == f"{pid} blue"

    with_cluster(tmp_path, body)


def test_a_failed_process_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster) -> None:
        exits = cluster.watch("")
        await cluster.start(spec("bad", "fail", text="broken pipe dream"))
        ended = await exits.get()
        assert ended.code == 1 and "RuntimeError: broken pipe dream" in ended.log_tail

    with_cluster(tmp_path, body)


@pytest.mark.parametrize("stubborn", [False, True])
def test_killing_a_process_ends_its_children_too(tmp_path: Path, stubborn: bool) -> None:
    async def body(cluster: LocalCluster) -> None:
        pid, grandchild = await started(cluster, tmp_path / "pid", stubborn=stubborn)
        await cluster.kill("s", grace_s=0.2)
        await eventually(lambda: not is_alive(pid) and not is_alive(grandchild))
        assert cluster.names("") == []

    with_cluster(tmp_path, body)


def test_a_process_killed_from_outside_is_reported_and_its_name_is_free_again(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster) -> None:
        exits = cluster.watch("s")
        pid, grandchild = await started(cluster, tmp_path / "pid")
        os.kill(pid, signal.SIGKILL)
        assert (await exits.get()).code == -signal.SIGKILL
        await eventually(lambda: not is_alive(grandchild))
        await started(cluster, tmp_path / "pid2")

    with_cluster(tmp_path, body)


def test_a_name_runs_once(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster) -> None:
        await started(cluster, tmp_path / "pid")
        with pytest.raises(ClusterError, match="process s runs already"):
            await cluster.start(spec("s", "sleep", path=str(tmp_path / "other")))

    with_cluster(tmp_path, body)


def test_closing_the_cluster_leaves_no_process(tmp_path: Path) -> None:
    pids: list[int] = []

    async def body(cluster: LocalCluster) -> None:
        for number in range(3):
            pids.extend(await started(cluster, tmp_path / f"pid{number}", name=f"s{number}"))

    with_cluster(tmp_path, body)
    assert len(pids) == 6 and not any(is_alive(pid) for pid in pids)


def test_a_fork_server_that_cannot_import_is_an_error_with_its_log(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = LocalCluster(tmp_path / "logs", preload=("no_such_module",))
        with pytest.raises(ClusterError, match="no_such_module"):
            await cluster.boot()
        await cluster.close()

    asyncio.run(main())


def test_nothing_survives_the_sudden_death_of_the_owner(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from megloom.compute.cluster.local import LocalCluster
from megloom.compute.cluster.protocol import ProcessSpec
async def main():
    cluster = LocalCluster(pathlib.Path({str(tmp_path / "logs")!r}), preload=({ENTRIES!r},))
    args = {{"path": {str(tmp_path / "pid")!r}}}
    pid = await cluster.start(ProcessSpec(name="s", entry={ENTRIES + ":sleep"!r}, args=args))
    print(pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())

    async def check() -> None:
        await eventually(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
        grandchild = int((tmp_path / "pid").read_text())
        owner.kill()
        owner.wait()
        await eventually(lambda: not is_alive(pid) and not is_alive(grandchild))

    asyncio.run(check())
    owner.stdout.close()
