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
    moved = Committed(
        version=4, parent_version=3, uri="u4", digest="d4", state_path="s4", old_states=((3, "s3"),)
    )
    assert after.policies["a"] == moved
    assert after.policies["b"] == ledger().policies["b"]


@pytest.mark.parametrize("version", [3, 5])
def test_a_version_that_is_not_the_next_one_is_refused(version: int) -> None:
    with pytest.raises(ValueError, match=f"policy a: published version {version} after 3"):
        ledger().committed(cursor=Cursor(), published={"a": published(version)}, states={})


def run_of(num_versions: int) -> Ledger:
    """Policy a, trained so many versions beyond the third; every trainer state is kept."""
    now = ledger()
    for version in range(4, 4 + num_versions):
        now = now.committed(cursor=Cursor(), published={"a": published(version)}, states={"a": f"s{version}"})
    return now


def test_a_rollback_moves_the_pointer_and_uses_up_no_number_twice() -> None:
    back = run_of(3).rolled_back("a", published(4), parent_version=3)
    entry = back.policies["a"]
    assert (entry.version, entry.parent_version, entry.uri, entry.state_path) == (4, 3, "u4", "s4")
    assert (entry.highest, back.next_version("a"), back.next_step) == (6, 7, 8)
    assert back.policies["b"] == ledger().policies["b"] and back.cursor == run_of(3).cursor
    with pytest.raises(ValueError, match="published version 5 after 6"):
        back.committed(cursor=Cursor(), published={"a": published(5)}, states={})
    after = back.committed(cursor=Cursor(), published={"a": published(7)}, states={"a": "s7"})
    assert (after.versions()["a"], after.policies["a"].parent_version) == (7, 4)
    assert after.policies["a"].highest == 7
    again = after.rolled_back("a", published(5), parent_version=4)
    assert (again.next_version("a"), again.policies["a"].parent_version) == (8, 4)


@pytest.mark.parametrize("version", [6, 7, -1])
def test_a_rollback_goes_to_another_version_that_there_was(version: int) -> None:
    with pytest.raises(
        ValueError, match=f"policy a: cannot roll back to version {version} .on version 6, had"
    ):
        run_of(3).rolled_back("a", published(version), parent_version=None)


def test_states_are_kept_of_the_newest_versions_and_of_pinned_ones() -> None:
    all_kept = run_of(4)
    assert all_kept.policies["a"].states() == {n: f"s{n}" for n in (7, 6, 5, 4, 3)}
    kept, dropped = all_kept.keeping(1, {})
    assert kept.policies["a"].states() == {7: "s7"} and sorted(dropped) == ["s3", "s4", "s5", "s6"]
    kept, dropped = all_kept.keeping(2, {"a": {4}})
    assert kept.policies["a"].states() == {7: "s7", 6: "s6", 4: "s4"} and sorted(dropped) == ["s3", "s5"]
    assert kept.policies["b"] == ledger().policies["b"]


def test_a_rollback_without_a_kept_state_starts_with_fresh_moments() -> None:
    kept, _ = run_of(3).keeping(1, {})
    back = kept.rolled_back("a", published(4), parent_version=3).policies["a"]
    assert back.state_path is None and back.states() == {6: "s6"}


def test_a_rollback_forgets_what_the_policys_algorithm_carried_along_the_line_that_is_left() -> None:
    states = {"a": {"baseline": 0.5}, "b": {"baseline": 0.7}}
    now = run_of(2).committed(
        cursor=Cursor(), published={"a": published(6)}, states={}, algorithm_states=states
    )
    assert now.rolled_back("a", published(4), parent_version=3).algorithm_states == {"b": {"baseline": 0.7}}


def test_a_snapshot_survives_json() -> None:
    for it in (ledger(), run_of(2), run_of(3).rolled_back("a", published(4), parent_version=3)):
        assert Ledger.from_json(json.loads(json.dumps(it.to_json()))) == it


def test_a_ledger_of_before_rollbacks_opens() -> None:
    data = ledger().to_json()
    for entry in data["policies"].values():
        del entry["max_version"], entry["old_states"]
    assert Ledger.from_json(json.loads(json.dumps(data))) == ledger()
