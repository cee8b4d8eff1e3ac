from __future__ import annotations

import asyncio
from typing import Any

from megloom.compute.store.files import Folder
from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.recovery import remove_orphans
from megloom.compute.store.seal import write_step
from megloom.compute.store.store import MegStore


def test_files_of_later_steps_go_and_those_of_sealed_ones_stay(root: str, build: Any) -> None:
    folder = Folder(root)
    write_step(folder, "r", 1, [build.edge()], None, {})
    folder.write("meg/r/step=000001/dropped.json", b"{}")
    before = folder.names("meg/r/step=000001")
    folder.write("meg/r/step=000001/.draft-x", b"left by a kill after the manifest")
    for name in ("edges-0123456789ab.parquet", ".draft-x", ".manifest.json.1.2"):
        folder.write(f"meg/r/step=000002/{name}", b"half")
    folder.write("meg/r/step=000012/edges.parquet", b"half")
    folder.write("meg/r/writers/000001.json", b"{}")
    folder.write("meg/other/step=000002/edges.parquet", b"another run's")
    removed = remove_orphans(folder, "r", 1)
    assert len(removed) == 5
    assert (folder.names("meg/r/step=000002"), folder.names("meg/r/step=000012")) == ([], [])
    assert folder.names("meg/r/step=000001") == before
    assert folder.names("meg/r/writers") == ["000001.json"]
    assert folder.names("meg/other/step=000002") == ["edges.parquet"]
    assert remove_orphans(folder, "r", 1) == []


def test_a_run_that_never_sealed_a_step_is_cleaned_too(root: str) -> None:
    folder = Folder(root)
    folder.write("meg/r/step=000000/edges.parquet", b"half")
    assert remove_orphans(folder, "r", None) == ["meg/r/step=000000/edges.parquet"]


def test_recovering_a_store_removes_what_a_crash_left(root: str, build: Any) -> None:
    async def main() -> None:
        folder = Folder(root)
        folder.write("meg/r/step=000001/edges-0123456789ab.parquet", b"half")
        store = MegStore(root=root, journal=MemoryJournal(), offload=InlineOffload())
        assert await store.recover("r") is None
        assert folder.names("meg/r/step=000001") == []

    asyncio.run(main())
