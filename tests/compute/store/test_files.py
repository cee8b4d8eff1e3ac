from __future__ import annotations

from pathlib import Path

import pytest

from megloom.compute.store.files import Folder, file_digest


def test_a_file_is_read_as_it_was_written(root: str) -> None:
    folder = Folder(root)
    folder.write("a/b/x.bin", b"first")
    folder.write("a/b/x.bin", b"second")
    assert folder.read("a/b/x.bin") == b"second"
    assert (folder.names("a"), folder.names("a/b")) == (["b"], ["x.bin"])


def test_a_missing_file_is_named(root: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file a/x\.bin"):
        Folder(root).read("a/x.bin")


def test_a_removed_file_is_gone_and_removing_it_again_is_fine(root: str) -> None:
    folder = Folder(root)
    folder.write("a/x", b"1")
    folder.remove("a/x")
    folder.remove("a/x")
    assert not folder.exists("a/x")


def test_folders_with_a_file_are_found(root: str) -> None:
    folder = Folder(root)
    for path in ("a/2/m.json", "a/1/m.json", "a/3/other", "a/m.json", "a/4/b/m.json"):
        folder.write(path, b"")
    assert folder.folders_with("a", "m.json") == ["1", "2"]
    assert folder.folders_with("nowhere", "m.json") == []


def test_a_draft_is_kept_under_its_name_and_knows_its_digest(root: str) -> None:
    folder = Folder(root)
    with folder.draft("a") as draft:
        draft.write(b"first ")
        draft.write(memoryview(b"second"))
        folder.keep(draft, f"a/{draft.digest()}")
    assert (draft.digest(), draft.size_bytes) == (file_digest(b"first second"), 12)
    assert folder.names("a") == [draft.digest()]
    assert folder.read(f"a/{draft.digest()}") == b"first second"


def test_a_draft_that_is_not_kept_leaves_nothing(root: str) -> None:
    folder = Folder(root)
    with pytest.raises(ZeroDivisionError), folder.draft("a") as draft:
        draft.write(b"half")
        raise ZeroDivisionError
    assert folder.names("a") == []
    assert draft.write(b"the rest") == 8


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
