"""The version ledger: versions only grow, one at a time, and a snapshot is exact."""

from __future__ import annotations

import json

import pytest

from megloom.compute.conductor.ledger import Committed, Ledger
from megloom.compute.scheduling.cursor import Cursor
from megloom.compute.trainers.protocol import Published


def ledger() -> Ledger:
    start = Committed(version=3, parent_version=2, uri="u3", digest="d3", state_path="s3")
    return Ledger(next_step=4, cursor=Cursor(epoch=1, offset=2), policies={"a": start, "b": start})


def published(version: int) -> Published:
    return Published(uri=f"u{version}", version=version, digest=f"d{version}", size_bytes=1)


def test_a_commit_moves_the_published_policies_and_keeps_the_others() -> None:
    after = ledger().committed(cursor=Cursor(offset=5), published={"a": published(4)}, states={"a": "s4"})
    assert (after.next_step, after.cursor, after.versions()) == (5, Cursor(offset=5), {"a": 4, "b": 3})
    moved = Committed(version=4, parent_version=3, uri="u4", digest="d4", state_path="s4")
    assert after.policies["a"] == moved
    assert after.policies["b"] == ledger().policies["b"]


@pytest.mark.parametrize("version", [3, 5])
def test_a_version_that_is_not_the_next_one_is_refused(version: int) -> None:
    with pytest.raises(ValueError, match=f"policy a: published version {version} after 3"):
        ledger().committed(cursor=Cursor(), published={"a": published(version)}, states={})


def test_a_snapshot_survives_json() -> None:
    assert Ledger.from_json(json.loads(json.dumps(ledger().to_json()))) == ledger()
