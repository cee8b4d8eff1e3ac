from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from megloom.compute.graph.schemas import SCHEMAS
from megloom.compute.store.dropped import DROPPED
from megloom.compute.store.errors import CorruptFile
from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.compaction import compact
from megloom.compute.store.lineage.sql import BadQuery, query, views, write_views
from megloom.compute.store.seal import write_step
from tests.compute.store.lineage.test_lineage_backward import file_of, step_0, step_1, step_2

V1 = str(Path(__file__).parents[3] / "data" / "meg_v1")


def seal(root: str, build: Any) -> str:
    for step, records in enumerate((step_0(build), [*step_1(build), build.segment()], step_2(build))):
        write_step(Folder(root), "r", step, records, step - 1 if step else None, {})
    return root


@pytest.fixture
def sealed(tmp_path: Path, build: Any) -> str:
    """A store on disk; `everywhere` is one on each kind of file system."""
    return seal(str(tmp_path / "store"), build)


@pytest.fixture
def everywhere(root: str, build: Any) -> str:
    return seal(root, build)


def rows(root: str, sql: str, **options: Any) -> list[tuple[Any, ...]]:
    return list(query(root, "r", sql, **options).rows)


def test_users_query_the_tables_with_their_own_sql(everywhere: str) -> None:
    with duckdb.connect(":memory:") as con:
        views(con, everywhere, "r")
        found = con.execute(
            "select agent, count(*) from invocations group by agent order by agent"
        ).fetchall()
    assert found == [("planner", 2), ("solver", 4)]


def test_every_table_and_agent_has_a_view_with_the_schemas_columns(sealed: str) -> None:
    with duckdb.connect(":memory:") as con:
        names = views(con, sealed, "r")
        for table, schema in SCHEMAS.items():
            found = con.execute(f"select * from {table} limit 0").description
            assert [column[0] for column in found] == schema.names
    assert set(names) - set(SCHEMAS) == {
        "invocations_planner", "invocations_solver", "samples_planner", "samples_solver",
        "versions", "version_edges", "task_uses", "reward_uses",
    }  # fmt: skip


def test_a_view_of_an_agent_holds_its_rows_alone(sealed: str) -> None:
    assert rows(sealed, "select invocation_id from invocations_planner order by 1") == [("p1",), ("p2",)]


def test_the_step_comes_from_the_folder_and_lists_come_back(sealed: str) -> None:
    found = rows(
        sealed, "select step, sample_ids from micro_batches where step = 1 order by position, policy"
    )
    assert found == [(1, ["xp1"]), (1, ["xs1"]), (1, ["xs2"])]


@pytest.mark.parametrize("is_compacted", [False, True])
def test_the_index_can_be_queried(everywhere: str, is_compacted: bool) -> None:
    if is_compacted:
        compact(Folder(everywhere), "r", 2, fan_out=3)
    assert rows(everywhere, "select count(*) from versions") == [(6,)]
    assert rows(everywhere, "select policy, version, num_samples from task_uses where task_id = 't2'") == [
        ("solver", 2, 1)
    ]
    assert rows(everywhere, "select count(*) from version_edges where relation = 'parent'") == [(4,)]
    assert rows(everywhere, "select distinct reward_hash from reward_uses") == [("h",)]


def test_a_long_result_is_counted_and_cut(sealed: str) -> None:
    found = query(sealed, "r", "select range as n from range(25000)", max_rows=3)
    assert (found.columns, found.rows, found.num_rows) == (("n",), ((0,), (1,), (2,)), 25000)


def test_a_wrong_query_tells_duckdbs_message_in_one_line_and_the_views(sealed: str) -> None:
    with pytest.raises(BadQuery, match=r"^Catalog Error: .*invocation.*\nviews: tasks, .*reward_uses$"):
        query(sealed, "r", "select * from invocation")
    with pytest.raises(BadQuery, match="^Parser Error: "):
        query(sealed, "r", "selec 1")


@pytest.mark.parametrize(
    "sql",
    [
        "copy (select 1) to 'x.csv'",
        "attach 'x.db'",
        "drop view tasks",
        "select 1; select 2",
        "",
        "pragma version",
    ],
)
def test_anything_but_one_select_is_refused(sealed: str, sql: str) -> None:
    with pytest.raises(BadQuery, match=r"^expected one SELECT, got "):
        query(sealed, "r", sql)


@pytest.mark.parametrize("function", ["read_csv", "read_text"])
def test_a_query_reaches_no_file_outside_the_store(everywhere: str, tmp_path: Path, function: str) -> None:
    outside = tmp_path / "secret.csv"
    outside.write_text("a\n1\n")
    with pytest.raises(BadQuery, match="Permission Error"):
        query(everywhere, "r", f"select * from {function}('{outside}')")


def test_a_file_of_another_size_or_a_missing_one_is_named_before_any_query(sealed: str) -> None:
    path = file_of(sealed, 1, "samples-solver")
    Folder(sealed).write(path, b"PAR1")
    with pytest.raises(CorruptFile, match=f"{path}: 4 bytes, its manifest says"):
        query(sealed, "r", "select 1")
    Folder(sealed).remove(path)
    with pytest.raises(FileNotFoundError, match=path):
        query(sealed, "r", "select 1")


def test_verify_finds_a_file_of_the_same_size_with_other_bytes(sealed: str) -> None:
    path = file_of(sealed, 1, "tasks")
    data = Folder(sealed).read(path)
    Folder(sealed).write(path, data[:10] + bytes([data[10] ^ 1]) + data[11:])
    assert rows(sealed, "select count(*) from samples") == [(5,)]
    with pytest.raises(CorruptFile, match=f"{path}: digest"):
        query(sealed, "r", "select count(*) from samples", verify=True)


def test_tables_that_retention_dropped_are_empty(sealed: str) -> None:
    where = "meg/r/step=000001"
    assert rows(sealed, "select count(*) from segments") == [(1,)]
    Folder(sealed).publish(f"{where}/{DROPPED}", b'{"tables": ["segments"], "reason": "old", "at": "now"}')
    Folder(sealed).remove(file_of(sealed, 1, "segments"))
    assert rows(sealed, "select count(*) from segments") == [(0,)]


def test_a_store_of_schema_1_has_this_schemas_columns() -> None:
    columns = "member, attempt, num_reentries, group_id"
    found = query(V1, "old", f"select {columns} from invocations order by invocation_id desc")
    assert found.rows[0] == (1, 0, 0, "g000002-0001")
    leaf = query(V1, "old", "select distinct right(leaf_segment, 2) from samples").rows
    assert leaf == (("-c",),)
    assert query(V1, "old", "select count(*), count(distinct policy) from versions").rows == ((7, 3),)


def test_a_database_file_with_the_views_opens_in_any_client(build: Any, tmp_path: Path) -> None:
    root, path = str(tmp_path / "store"), tmp_path / "run.duckdb"
    write_step(Folder(root), "r", 0, step_0(build), None, {})
    assert "versions" in write_views(root, "r", path)
    with duckdb.connect(str(path), read_only=True) as con:
        assert con.execute("select policy, version from versions order by all").fetchall() == [
            ("planner", 0),
            ("planner", 1),
            ("solver", 0),
        ]
    with pytest.raises(FileExistsError, match=r"run\.duckdb exists"):
        write_views(root, "r", path)


def test_no_file_is_left_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no sealed step"):
        write_views(str(tmp_path), "nobody", tmp_path / "run.duckdb")
    assert not (tmp_path / "run.duckdb").exists()
