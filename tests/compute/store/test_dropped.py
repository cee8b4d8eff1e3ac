from __future__ import annotations

import json
from typing import Any

import pytest

from megloom.compute.graph.schemas import from_table
from megloom.compute.store.dropped import read_dropped
from megloom.compute.store.errors import CorruptFile, StoreError, TokensDropped
from megloom.compute.store.files import Folder
from megloom.compute.store.reader import MegReader
from megloom.compute.store.seal import write_step

MARK = json.dumps({"tables": ["segments"], "reason": "older than 3 versions", "at": "2026-01-01T00:00:00Z"})


def sealed(root: str, build: Any) -> Folder:
    folder = Folder(root)
    for step in (1, 2):
        write_step(folder, "r", step, [build.segment(f"s{step}", step=step), build.edge(step=step)], None, {})
    return folder


def drop(folder: Folder, table: str, mark: str | None = MARK) -> None:
    """Removes the table of step 1, as retention does."""
    if mark is not None:
        folder.publish("meg/r/step=000001/dropped.json", mark.encode())
    for file in MegReader(folder).read_manifest("r", 1).files:
        if file.table == table:
            folder.remove(f"meg/r/step=000001/{file.name}")


def test_dropped_tokens_are_named_with_their_step_and_the_reason(root: str, build: Any) -> None:
    drop(sealed(root, build), "segments")
    with pytest.raises(
        TokensDropped,
        match=r"run r step 1: segments were dropped at 2026\S+: older than 3 versions .*segments-",
    ):
        MegReader(root).read_table("r", "segments")
    assert issubclass(TokensDropped, StoreError)


def test_a_reader_that_accepts_holes_gets_the_rest(root: str, build: Any) -> None:
    drop(sealed(root, build), "segments")
    reader = MegReader(root)
    found = reader.read_table("r", "segments", dropped="skip")
    assert from_table("segments", found) == [build.segment("s2", step=2)]
    assert reader.read_table("r", "segments", steps=[1], dropped="skip").num_rows == 0
    assert reader.read_table("r", "edges").num_rows == 2


def test_what_is_marked_and_still_there_is_read(root: str, build: Any) -> None:
    sealed(root, build).publish("meg/r/step=000001/dropped.json", MARK.encode())
    assert MegReader(root).read_table("r", "segments").num_rows == 2


@pytest.mark.parametrize("table, mark", [("edges", MARK), ("segments", None)])
def test_a_lost_file_that_no_mark_covers_is_missing_even_where_holes_are_accepted(
    root: str, build: Any, table: str, mark: str | None
) -> None:
    drop(sealed(root, build), table, mark)
    with pytest.raises(FileNotFoundError, match=rf"step=000001/{table}-\w+\.parquet"):
        MegReader(root).read_table("r", table, dropped="skip")


@pytest.mark.parametrize("mark", [b"", b"[]", b'{"tables": ["segments"]}'])
def test_a_damaged_mark_is_named(root: str, build: Any, mark: bytes) -> None:
    folder = sealed(root, build)
    folder.publish("meg/r/step=000001/dropped.json", mark)
    with pytest.raises(CorruptFile, match=r"meg/r/step=000001/dropped\.json"):
        read_dropped(folder, "r", 1)
