from __future__ import annotations

from pathlib import Path

import pytest

from megloom.compute.store.files import Folder


def test_a_file_is_read_as_it_was_written(root: str) -> None:
    folder = Folder(root)
    folder.write("a/b/x.bin", b"first")
    folder.write("a/b/x.bin", b"second")
    assert folder.read("a/b/x.bin") == b"second"
    assert (folder.names("a"), folder.names("a/b")) == (["b"], ["x.bin"])


def test_a_missing_file_is_named(root: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file a/x\.bin"):
        Folder(root).read("a/x.bin")


def test_a_missing_folder_has_no_names(root: str) -> None:
    assert Folder(root).names("nowhere") == []
    assert not Folder(root).exists("nowhere")


def test_publishing_twice_fails_and_keeps_the_first_content(root: str) -> None:
    folder = Folder(root)
    folder.publish("a/manifest.json", b"first")
    with pytest.raises(FileExistsError):
        folder.publish("a/manifest.json", b"second")
    assert folder.read("a/manifest.json") == b"first"
    assert folder.names("a") == ["manifest.json"]


def test_another_process_sees_a_new_file_at_once(root: str) -> None:
    reader, writer = Folder(root), Folder(root)
    assert reader.names("a") == []
    writer.write("a/x", b"")
    assert reader.names("a") == ["x"]


def test_a_file_url_and_its_path_are_the_same_folder(tmp_path: Path) -> None:
    Folder(f"file://{tmp_path}").publish("x", b"1")
    assert Folder(str(tmp_path)).read("x") == b"1"
