from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megloom.compute.graph.schemas import SCHEMA_VERSION
from megloom.compute.store.errors import CorruptFile, StoreError
from megloom.compute.store.manifest import (
    Manifest,
    SealedFile,
    manifest_bytes,
    parse_manifest,
    path_name,
    step_folder,
    step_of,
)

FILE = SealedFile(name="x.parquet", table="edges", agent=None, num_rows=2, size_bytes=9, digest="ab")
MANIFEST = Manifest(
    run="r", step=12, previous_step=11, files=(FILE, FILE), snapshot={"cursor": {"ü": [1, None]}}
)


def test_a_manifest_comes_back_from_its_bytes() -> None:
    assert parse_manifest(manifest_bytes(MANIFEST), "m") == MANIFEST
    assert MANIFEST.num_rows == {"edges": 4}


def test_the_rows_of_an_index_do_not_count_as_records() -> None:
    index = replace(FILE, table="index_versions")
    assert replace(MANIFEST, files=(FILE, index)).num_rows == {"edges": 2}


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"digest": "x"}', manifest_bytes(MANIFEST)[:-9]])
def test_what_is_no_manifest_is_refused_by_its_path(damage: bytes) -> None:
    with pytest.raises(CorruptFile, match=r"meg/r/manifest\.json"):
        parse_manifest(damage, "meg/r/manifest.json")


def test_a_changed_number_is_noticed() -> None:
    changed = manifest_bytes(MANIFEST).replace(b'"num_rows": 2', b'"num_rows": 3')
    with pytest.raises(CorruptFile, match="does not match its digest"):
        parse_manifest(changed, "m")


def test_a_manifest_of_a_newer_program_is_refused() -> None:
    with pytest.raises(StoreError, match="schema version"):
        parse_manifest(manifest_bytes(replace(MANIFEST, schema_version=SCHEMA_VERSION + 1)), "m")


def test_a_snapshot_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError):
        manifest_bytes(replace(MANIFEST, snapshot={"loss": math.nan}))


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\\b", "-rf", "a b", "x" * 101, "a\n"])
def test_a_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="run"):
        path_name("run", name)


def test_a_step_is_found_again_from_its_folder() -> None:
    assert step_folder("demo-1", 12) == "meg/demo-1/step=000012"
    assert [step_of("step=000012"), step_of("step=1234567"), step_of("step=x"), step_of(".step=000001")] == [
        12,
        1234567,
        None,
        None,
    ]
