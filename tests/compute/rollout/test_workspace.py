"""A program's files: fresh, watched, copied out without following what it left, removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megloom.compute.rollout.workspace import Workspace, WorkspaceError, create_workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    made = create_workspace({"src/main.py": "print(1)\n", "data.bin": b"\0\1"}, parent=tmp_path)
    yield made
    made.remove()
    assert list(tmp_path.iterdir()) == []


def collect(workspace: Workspace, max_bytes: int = 1000, max_files: int = 10) -> tuple[dict[str, bytes], str]:
    found = workspace.collect(max_bytes=max_bytes, max_files=max_files)
    return dict(found.files), " ".join(found.left_out)


def test_files_lie_where_the_program_runs_and_come_back(workspace: Workspace) -> None:
    assert collect(workspace) == ({"src/main.py": b"print(1)\n", "data.bin": b"\0\1"}, "")


def test_a_script_can_be_run(tmp_path: Path) -> None:
    made = create_workspace({"run": "#!/bin/sh\n", "plain": "x"}, parent=tmp_path)
    assert os.access(made.work / "run", os.X_OK)
    assert (made.work / "plain").stat().st_mode & 0o111 == 0
    made.remove()


@pytest.mark.parametrize("path", ["/etc/passwd", "../out", "a/../../out", "", "a\0b"])
def test_a_path_that_leads_out_is_refused_and_nothing_is_left(tmp_path: Path, path: str) -> None:
    with pytest.raises(WorkspaceError, match="expected a path inside the workspace"):
        create_workspace({path: "x"}, parent=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_devices_and_pipes_are_named_and_not_copied(workspace: Workspace, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("canary")
    (workspace.work / "link").symlink_to(secret / "key")
    (workspace.work / "folder").symlink_to(secret)
    os.link(secret / "key", workspace.work / "hard")
    os.mkfifo(workspace.work / "pipe")
    files, left_out = collect(workspace)
    assert set(files) == {"src/main.py", "data.bin"}
    assert left_out == (
        "'folder': a symbolic link 'hard': a hard link 'link': a symbolic link 'pipe': no regular file"
    )
    (secret / "key").unlink()
    secret.rmdir()


def test_a_name_that_is_no_text_is_left_out(workspace: Workspace) -> None:
    Path(os.fsdecode(os.fsencode(workspace.work) + b"/\xff")).write_text("x")
    files, left_out = collect(workspace)
    assert len(files) == 2 and left_out == "'\\udcff': its name is no text"


def test_what_does_not_fit_is_named(workspace: Workspace) -> None:
    (workspace.work / "big").write_bytes(b"x" * 2000)
    files, left_out = collect(workspace)
    assert "big" not in files and left_out == "'big': more than 1000 bytes in all"
    files, left_out = collect(workspace, max_bytes=10_000, max_files=1)
    assert list(files) == ["big"]
    assert left_out == "'data.bin': more than 1 files 'src/main.py': more than 1 files"


def test_a_sparse_file_counts_what_it_takes_and_is_not_read_whole(workspace: Workspace) -> None:
    with (workspace.work / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert workspace.used_bytes(1 << 30) < 1 << 20
    assert "sparse" not in collect(workspace)[0]


def test_many_empty_files_count(workspace: Workspace) -> None:
    before = workspace.used_bytes(1 << 40)
    for number in range(100):
        (workspace.home / str(number)).touch()
    assert workspace.used_bytes(1 << 40) - before >= 100 * 4096


def test_counting_stops_at_enough(workspace: Workspace) -> None:
    for number in range(100):
        (workspace.tmp / str(number)).write_bytes(b"x" * 4096)
    assert 10_000 < workspace.used_bytes(10_000) < 30_000


def test_a_directory_that_was_closed_is_removed_all_the_same(tmp_path: Path) -> None:
    made = create_workspace({"deep/er/file": "x"}, parent=tmp_path)
    (made.work / "deep" / "er").chmod(0)
    (made.work / "deep").chmod(0)
    made.remove()
    assert list(tmp_path.iterdir()) == []
